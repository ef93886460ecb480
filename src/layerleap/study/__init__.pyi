from . import exits as exits, studies as studies, suitability as suitability
from .claims import (
    LEVEL as LEVEL,
    Answer as Answer,
    Claim as Claim,
    Each as Each,
    Verdict as Verdict,
    above as above,
    all_of as all_of,
    at_every as at_every,
    below as below,
    between as between,
    claim as claim,
    confirmed as confirmed,
    difference as difference,
    filled as filled,
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
    Texts as Texts,
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
from .pages import Page as Page, Tested as Tested, words as words
from .picks import KNOWN as KNOWN, Pick as Pick, pick as pick, points as points
from .result import (
    Finding as Finding,
    Headline as Headline,
    Row as Row,
    Said as Said,
    Tables as Tables,
)
from .tables import (
    GOOD_OR_BAD as GOOD_OR_BAD,
    P_VALUE as P_VALUE,
    Column as Column,
    Table as Table,
    bounded as bounded,
    ends_in_words as ends_in_words,
    estimate as estimate,
    in_words as in_words,
    p_words as p_words,
    part_of as part_of,
    percent as percent,
)
from .texts import TextContext as TextContext, TextSettings as TextSettings
