from .attention import topk_attend as topk_attend
from .interface import check_arguments as check_arguments
from .masks import Visible as Visible
