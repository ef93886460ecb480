from .stitched import Carry as Carry, Stitched as Stitched, kernel_map as kernel_map
from .translation import translate as translate
