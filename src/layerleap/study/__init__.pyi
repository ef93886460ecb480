from . import exits as exits, studies as studies, suitability as suitability
from .claims import (
    LEVEL as LEVEL,
    Answer as Answer,
    Claim as Claim,
    Verdict as Verdict,
    above as above,
    all_of as all_of,
    at_every as at_every,
    below as below,
    between as between,
    confirmed as confirmed,
    difference as difference,
    more_than_half as more_than_half,
    opposite as opposite,
    share_of as share_of,
    untested as untested,
)
from .engine import (
    Box as Box,
    Context as Context,
    Picture as Picture,
    Section as Section,
    Settings as Settings,
    Study as Study,
    Tile as Tile,
    option as option,
)
from .exits import (
    CLOSE_UP as CLOSE_UP,
    CLOSE_UP_PANEL as CLOSE_UP_PANEL,
    RULE_LINES as RULE_LINES,
    Lensed as Lensed,
    exit_rows as exit_rows,
    generates_text as generates_text,
)
from .figures import (
    LENSES as LENSES,
    Axis as Axis,
    Figure as Figure,
    Line as Line,
    Mark as Mark,
    short as short,
)
from .fits import (
    FitContext as FitContext,
    FitSettings as FitSettings,
    Fitted as Fitted,
    named as named,
)
from .result import Finding as Finding, Row as Row, Tables as Tables
from .tables import (
    GOOD_OR_BAD as GOOD_OR_BAD,
    P_VALUE as P_VALUE,
    Column as Column,
    Table as Table,
    bounded as bounded,
    estimate as estimate,
    p_words as p_words,
    percent as percent,
)
from .texts import TextContext as TextContext, TextSettings as TextSettings
