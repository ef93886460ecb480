"""StudyResult: what a study measured, as plain tables, with findings and verdicts on claims.

In: what the engine ran. Out: an object to look at, save, load and turn into a report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerleap.errors import BadArtifact, BadSettings
from layerleap.extras import report_library
from layerleap.files import read_json, write_json
from layerleap.study.picks import chosen

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
Tables = dict[str, list[Row]]
FORMAT = 2


@dataclass(frozen=True)
class Finding:
    """One computed sentence; shown under a figure or table if it names one, else in its section."""

    text: str
    under: str = ""  # key of a figure
    headline: bool = False  # among the few sentences at the top of the page


class Headline(str):
    """A finding as plain text that is also among the few sentences at the top of the page."""


Said = Finding | str  # plain text stands under the first figure of its section, if it has one


@dataclass(frozen=True, eq=False)
class StudyResult:
    """A finished study. Made by a study or by `load`; tables hold plain JSON values only."""

    study: str  # its name
    version: str
    made: str
    model: Row
    settings: Row
    tables: Tables
    data: list[Row] = field(default_factory=list)  # what was read, and how much of it
    notes: list[str] = field(default_factory=list)
    sections: list[Row] = field(default_factory=list)  # key, title, status, reason, seconds
    findings: list[Row] = field(default_factory=list)  # section, text, under, headline
    claims: list[Row] = field(default_factory=list)  # section, claim, agrees, seen, why
    run: Row = field(default_factory=dict)  # seconds, whether it was resumed, peak memory
    artifacts: Mapping[str, Any] = field(default_factory=dict, repr=False)  # fitted along the way

    def __repr__(self) -> str:
        rows = sum(map(len, self.tables.values()))
        failed = f", {len(self.failed)} sections failed" if self.failed else ""
        return (
            f"StudyResult({self.study} of {self.model['name']}: {len(self.tables)} tables with "
            f"{rows:,} rows, {len(self.claims)} claims{failed})"
        )

    def rows(self, table: str, **where: Any) -> list[Row]:
        """The rows of a table, or those with the given values; none if there is no such table.

        A value may be `KNOWN`, for any but None, or several: see `Pick`.
        """
        return chosen(self.tables.get(table, []), where)

    def row(self, table: str, **where: Any) -> Row | None:
        """The first row with the given values, if there is one."""
        return next(iter(self.rows(table, **where)), None)

    @property
    def headlines(self) -> list[str]:
        """The few most telling findings."""
        return [row["text"] for row in self.findings if row["headline"]]

    @property
    def failed(self) -> dict[str, str]:
        """Sections that could not run, and why."""
        return {row["key"]: row["reason"] for row in self.sections if row["status"] == "failed"}

    @property
    def untested(self) -> list[Row]:
        """Claims that this run had no data for; `seen` says why."""
        return [row for row in self.claims if row["agrees"] == "not tested"]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the artifacts, as plain JSON values."""
        names = [field.name for field in fields(self) if field.name != "artifacts"]
        return {"format": FORMAT, **{name: getattr(self, name) for name in names}}

    def to_pandas(self, table: str) -> "pandas.DataFrame":
        """One of the tables as a data frame; `tables` has their names."""
        if table not in self.tables:
            raise BadSettings(f"no table {table!r}; choose one of {', '.join(self.tables)}")
        frame: pandas.DataFrame = report_library("pandas").DataFrame(self.tables[table])
        return frame

    def save(self, path: str | Path) -> Path:
        """Write everything but the artifacts as one JSON file."""
        write_json(Path(path), self.to_dict())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "StudyResult":
        """Read what `save` wrote."""
        content = read_json(Path(path))
        if content.pop("format", None) != FORMAT:
            raise BadArtifact(f"{path} is not a study result of format {FORMAT}; run it again")
        try:
            return cls(**content)
        except TypeError as error:
            raise BadArtifact(f"{path} does not describe a study result ({error})") from error

    def report(self, folder: str | Path = "report") -> Path:
        """Write the HTML page, its CSV files and the artifacts; returns the path of the page."""
        from layerleap.show.report.report import write_report  # a convenience

        return write_report(self, Path(folder))

    def _repr_html_(self) -> str:
        from layerleap.show.report.report import result_html  # a convenience

        return result_html(self)
