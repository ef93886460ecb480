// @ts-check
// Dark or light: as the system says, until the user says otherwise.

import { byId } from "./dom.js";

const KEPT = "layerleap-theme";
const THEMES = ["system", "light", "dark"];
const SIGNS = ["◐", "☀", "☾"];
const WORDS = ["as the system", "light", "dark"];

function kept() {
  try {
    return localStorage.getItem(KEPT) ?? "system";
  } catch {
    return "system";
  }
}

export function start() {
  const button = byId("theme");
  let theme = Math.max(0, THEMES.indexOf(kept()));
  const show = () => {
    if (theme) document.documentElement.dataset.theme = THEMES[theme];
    else delete document.documentElement.dataset.theme;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Colours: ${WORDS[theme]}`);
    button.title = `Colours: ${WORDS[theme]}`;
  };
  button.addEventListener("click", () => {
    theme = (theme + 1) % THEMES.length;
    try {
      localStorage.setItem(KEPT, THEMES[theme]);
    } catch {
      // Then the choice lasts as long as the tab.
    }
    show();
  });
  show();
}
