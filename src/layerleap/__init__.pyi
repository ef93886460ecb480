from . import stats as stats, zoo as zoo
from .act import edits as edits, exits as exits, learning as learning, metrics as metrics
from .act.debug.effect import Effect as Effect, effect as effect
from .act.decode.decoder import Decoder as Decoder, decoder as decoder
from .act.decode.generate import Generation as Generation, generate as generate
from .act.learning.trainer import finetune as finetune
from .act.patching.grid import patch as patch
from .act.patching.result import PatchGrid as PatchGrid
from .act.patchscope import Patchscope as Patchscope, patchscope as patchscope
from .act.steering.cost import steering_cost as steering_cost
from .act.steering.find import direction as direction
from .act.steering.saved import Direction as Direction
from .act.stitch.stitched import stitch as stitch
from .act.topk.interface import topk_attention as topk_attention
from .errors import LayerleapError as LayerleapError
from .lens.attention.attention import attention as attention
from .lens.attention.heads import heads as heads
from .lens.attribution.attribute import attribute as attribute
from .lens.compare.align import align as align
from .lens.compare.diff import diff as diff
from .lens.evaluate import Evaluation as Evaluation, evaluate as evaluate
from .lens.lens import Lens as Lens, read as read
from .lens.readings import Readings as Readings
from .lens.vocabulary.build import index as index, search as search
from .lens.vocabulary.index import ConceptIndex as ConceptIndex
from .lens.vocabulary.neurons import Neurons as Neurons, neurons as neurons
from .lens.vocabulary.weights import weights as weights
from .maps.bank import ShortcutBank as ShortcutBank
from .maps.fit import default_bank as default_bank, fit as fit
from .maps.imports import import_mat as import_mat, import_tuned_lens as import_tuned_lens
from .maps.tune import tune as tune
from .models.discovery.laws import check as check
from .models.load import load as load
from .models.transformer import Transformer as Transformer
from .models.untrained import untrained as untrained
from .show.web.session import debug as debug
from .stream import tasks as tasks
from .stream.documents import iter_documents as iter_documents
from .stream.sampling import Sampling as Sampling
from .study import studies as studies
from .study.result import StudyResult as StudyResult

__version__: str
STAGES: tuple[str, ...]
