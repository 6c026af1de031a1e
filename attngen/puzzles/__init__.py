"""Puzzles: CUDA kernels that a student writes, checked on the emulated device. A folder `NN_name/` is one puzzle.

puzzle.cu      what the student gets: contract, primitives (`#include "NAME.cuh"`), signature, and BLANK in its body
puzzle.py      `PUZZLE`: title, inputs with their float64 reference, launch, targets, hints
solution.cu    what replaces BLANK and reaches gold
wrong/NAME.cu  what replaces BLANK and must be refused: the first line says why (see `Wrong`)
slow/NAME.cu   what replaces BLANK, is right, and must not reach gold (see `Folder.slow`)
"""

from attngen.puzzles.counts import Target as Target
from attngen.puzzles.puzzle import Array as Array
from attngen.puzzles.puzzle import Case as Case
from attngen.puzzles.puzzle import Puzzle as Puzzle
from attngen.puzzles.puzzle import Random as Random
from attngen.puzzles.puzzle import normal_numbers as normal_numbers
from attngen.puzzles.puzzle import rows_map as rows_map
from attngen.puzzles.puzzle import whole_numbers as whole_numbers
from attngen.puzzles.reference import FAR as FAR
from attngen.puzzles.reference import Backward as Backward
from attngen.puzzles.reference import attention as attention
from attngen.puzzles.reference import far_scores as far_scores
from attngen.puzzles.reference import near as near
from attngen.puzzles.reference import positions as positions
from attngen.puzzles.reference import tolerance_of as tolerance_of
from attngen.puzzles.reference import weights as weights
