// Sortable tables: a click (or Enter, or Space) on a head sorts by it, again turns the order.
// Without this script the page is complete; only the sorting is missing.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => sortBy(table, heads, column));
  });
}

function sortBy(table, heads, column) {
  const up = heads[column].getAttribute("aria-sort") !== "ascending";
  for (const head of heads) head.setAttribute("aria-sort", "none");
  heads[column].setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  rows.sort((a, b) => compare(a.cells[column], b.cells[column], up ? 1 : -1));
  body.append(...rows);
}

// Numbers by value, words by alphabet; cells without a value stay at the end either way.
function compare(a, b, sign) {
  const x = a.dataset.sort, y = b.dataset.sort;
  if (x !== undefined && y !== undefined) return sign * (Number(x) - Number(y));
  if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1;
  return sign * a.textContent.trim().localeCompare(b.textContent.trim());
}
