"""The twelve stage colours, on a dark and on a light ground, in the order of the stages.

Any two stages, and neighbours by a wide margin, stay apart for normal, deuteranopic, protanopic and
tritanopic eyes (checked in the tests with Machado's matrices and CIEDE2000). Hue never stands
alone: a drawing adds a texture, a word or an order.
"""

from typing import Final

STAGE_COLOURS_DARK: Final = (
    "#76dbf6", "#367d99", "#b5d7c1", "#b395be", "#7447f1", "#f9d198", "#dd7408",
    "#faf54f", "#c2362c", "#edf0f5", "#2f99fa", "#888787",
)  # fmt: skip
STAGE_COLOURS_LIGHT: Final = (
    "#0ab2e4", "#1b4d75", "#2a9370", "#9f74a6", "#4c1bd7", "#bba47a", "#c76706",
    "#daa108", "#9c232d", "#373e4f", "#3266f2", "#a2a7a9",
)  # fmt: skip
