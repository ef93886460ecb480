"""Write the tables of what came out of each paper into the pages that show them.

    python papers/table.py           update the pages; this is what `make results-table` does
    python papers/table.py --check   change nothing; exit with 1 if a page is out of date

In: the studies in papers/pyproject.toml, and results/*/claims.csv in the folder of each paper.
Out: the lines between <!-- results --> and <!-- end of results --> in README.md and
papers/README.md (one row per paper), and in the README.md of every paper (one row per claim).
"""

import csv
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent
ANSWERS = {
    "yes": "agree",
    "partly": "partly",
    "no": "do not",
    "cannot tell": "cannot tell",
    "not tested": "not tested",
}
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


@dataclass(frozen=True)
class Paper:
    """The folder of a paper: its page, and the results that are kept in it."""

    folder: Path

    @property
    def page(self) -> Path:
        """What the paper says and what came out here."""
        return self.folder / "README.md"

    @cached_property
    def title(self) -> str:
        """The heading of the page."""
        return self.page.read_text("utf8").splitlines()[0].removeprefix("# ")

    @cached_property
    def runs(self) -> list[Path]:
        """Folders of results, one for each model; those with claims first."""
        folders = [path.parent for path in self.folder.glob("results/*/findings.txt")]
        return sorted(folders, key=lambda run: (not (run / "claims.csv").is_file(), run.name))

    @cached_property
    def answers(self) -> dict[str, dict[str, str]]:
        """Claim -> run -> answer, of the runs that tested claims."""
        answers: dict[str, dict[str, str]] = {}
        for run in self.runs:
            if (run / "claims.csv").is_file():
                with (run / "claims.csv").open(encoding="utf8", newline="") as file:
                    for row in csv.DictReader(file):
                        answers.setdefault(row["claim"], {})[run.name] = row["agrees"]
        return answers

    @property
    def counts(self) -> Counter[str]:
        """How often each answer was given to a claim, over all runs."""
        return Counter(answer for by_run in self.answers.values() for answer in by_run.values())


def papers(root: Path = HERE) -> list[Paper]:
    """All papers, in the order of their studies in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf8"))["project"]
    modules = [
        entry.partition(":")[0] for entry in project["entry-points"]["layerleap.studies"].values()
    ]
    return [Paper(root.joinpath(*module.split("."))) for module in modules]


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_paper(every: list[Paper], page: Path) -> str:
    """One row per paper: its models, and how many of its claims agree with what came out."""
    rows = []
    for paper in every:
        runs = [
            link(run.name, run / "findings.txt", page)
            + ("" if (run / "claims.csv").is_file() else " (claims not kept)")
            for run in paper.runs
        ]
        counts = [str(paper.counts[answer]) for answer in ANSWERS]
        rows.append([link(paper.title, paper.page, page), ", ".join(runs), *counts])
    return table(["paper", "results", *ANSWERS.values()], rows)


def by_claim(paper: Paper) -> str:
    """One row per claim: what each run answered."""
    tested = [run for run in paper.runs if (run / "claims.csv").is_file()]
    columns = [
        f"{link(run.name, run / 'claims.csv', paper.page)} "
        f"({link('findings', run / 'findings.txt', paper.page)})"
        for run in tested
    ]
    rows = [
        [claim.replace("|", r"\|"), *(by_run.get(run.name, "") for run in tested)]
        for claim, by_run in paper.answers.items()
    ]
    return table(["claim", *columns], rows)


def link(words: str, target: Path, page: Path) -> str:
    """A link from a page to a file."""
    return f"[{words}]({Path(os.path.relpath(target, page.parent)).as_posix()})"


def updated(page: Path, lines: str) -> str:
    """The text of a page with `lines` between its two marks."""
    before, begin, rest = page.read_text("utf8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN} and {END}; expected them around its table")
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


def pages(root: Path = HERE) -> dict[Path, str]:
    """Every page with a table -> the text that it should have."""
    every = papers(root)
    overviews = (root.parent / "README.md", root / "README.md")
    return {
        **{page: updated(page, by_paper(every, page)) for page in overviews},
        **{paper.page: updated(paper.page, by_claim(paper)) for paper in every},
    }


def main() -> int:
    """Write the pages that are out of date, or name them."""
    stale = {page: text for page, text in pages().items() if page.read_text("utf8") != text}
    if "--check" in sys.argv[1:]:
        sys.stderr.writelines(f"{page} is out of date; run: make results-table\n" for page in stale)
        return 1 if stale else 0
    for page, text in stale.items():
        page.write_text(text, "utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
