"""Colours and glyphs: told apart by colour-blind eyes, by few colours, and by none."""

from __future__ import annotations

import itertools
import math

import pytest
from rich.color import Color, ColorSystem

from engine_hooks.protocol.stages import STAGES, Group, Stage
from tracer.tui.toolkit.theme import (
    ANSI16,
    ASCII,
    DARK,
    LIGHT,
    MONO,
    PALETTES,
    STAGE_COLOURS_DARK,
    STAGE_COLOURS_LIGHT,
    UNICODE,
    Look,
    choose_glyphs,
    choose_palette,
    textual_theme,
)

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear(colour: str) -> list[float]:
    """Linear RGB of ``#rrggbb``."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of linear RGB."""
    matrix = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    white = (0.95047, 1.0, 1.08883)
    f = []
    for row, w in zip(matrix, white, strict=True):
        t = sum(m * c for m, c in zip(row, rgb, strict=True)) / w
        f.append(t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def ciede2000(one: tuple[float, float, float], two: tuple[float, float, float]) -> float:
    """Perceived difference of two colours: 2.3 is just noticeable side by side."""
    l1, a1, b1 = one
    l2, a2, b2 = two
    mean_c = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean_c**7 / (mean_c**7 + 25.0**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    dh = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    d_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(dh / 2))
    lm, cm = (l1 + l2) / 2, (c1 + c2) / 2
    hm = (h1 + h2 + 360) / 2 if abs(h1 - h2) > 180 else (h1 + h2) / 2
    t = (
        1 - 0.17 * math.cos(math.radians(hm - 30)) + 0.24 * math.cos(math.radians(2 * hm))
        + 0.32 * math.cos(math.radians(3 * hm + 6)) - 0.20 * math.cos(math.radians(4 * hm - 63))
    )  # fmt: skip
    s_l = 1 + 0.015 * (lm - 50) ** 2 / math.sqrt(20 + (lm - 50) ** 2)
    s_c, s_h = 1 + 0.045 * cm, 1 + 0.015 * cm * t
    r_t = (
        -2
        * math.sqrt(cm**7 / (cm**7 + 25.0**7))
        * math.sin(math.radians(60 * math.exp(-(((hm - 275) / 25) ** 2))))
    )
    x, y, z = (l2 - l1) / s_l, (c2 - c1) / s_c, d_h / s_h
    return math.sqrt(x * x + y * y + z * z + r_t * y * z)


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    """A colour as eyes of a kind see it."""
    rgb = linear(colour)
    return lab(
        [
            min(1.0, max(0.0, sum(m * c for m, c in zip(row, rgb, strict=True))))
            for row in VISION[vision]
        ]
    )


def test_the_colour_difference_is_that_of_the_published_pairs() -> None:
    # Two pairs of the data set of Sharma, Wu and Dalal.
    assert ciede2000((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)) == pytest.approx(
        2.0425, abs=1e-4
    )
    assert ciede2000((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387)) == pytest.approx(
        1.2644, abs=1e-4
    )


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    ("colours", "any_two", "neighbours"),
    [(STAGE_COLOURS_DARK, 11, 20), (STAGE_COLOURS_LIGHT, 9, 12)],
)
def test_stages_are_told_apart_by_all_eyes(
    colours: tuple[str, ...], any_two: float, neighbours: float, vision: str
) -> None:
    looks = [seen(colour, vision) for colour in colours]
    assert min(ciede2000(a, b) for a, b in itertools.combinations(looks, 2)) >= any_two
    assert min(ciede2000(a, b) for a, b in itertools.pairwise(looks)) >= neighbours


@pytest.mark.parametrize("colours", [STAGE_COLOURS_DARK, STAGE_COLOURS_LIGHT])
def test_stages_stay_distinct_with_256_colours(colours: tuple[str, ...]) -> None:
    downgraded = {Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).number for colour in colours}
    assert len(downgraded) == len(STAGES)


@pytest.mark.parametrize(("palette", "least"), [(DARK, 3.0), (LIGHT, 2.2)])
def test_stages_stand_out_from_the_background(palette: object, least: float) -> None:
    def luminance(colour: str) -> float:
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))

    for colour in palette.stages:  # type: ignore[attr-defined]
        one, two = luminance(colour), luminance(palette.back)  # type: ignore[attr-defined]
        assert (max(one, two) + 0.05) / (min(one, two) + 0.05) >= least


def test_sixteen_colours_leave_the_background_alone_and_are_named() -> None:
    look = Look(ANSI16, UNICODE)
    assert look.text.color is None
    assert look.text.bgcolor is None
    for stage in Stage:
        colour = look.stage(stage).color
        assert colour is not None
        assert colour.triplet is None
    assert len(set(ANSI16.stages)) == len(STAGES)


def test_without_colours_groups_are_told_by_glyph_and_selection_by_reverse() -> None:
    for glyphs in (UNICODE, ASCII):
        look = Look(MONO, glyphs)
        assert (
            len({look.glyphs.fill[group] for group in Group} | {glyphs.wait, " "}) == len(Group) + 2
        )
        assert look.on(look.text, MONO.selected, reverse=True).reverse
        for style in vars(look).values():
            assert getattr(style, "color", None) is None


def test_every_glyph_takes_one_cell_and_ascii_is_ascii() -> None:
    for glyphs in (UNICODE, ASCII):
        texts = [getattr(glyphs, name) for name in glyphs.__dataclass_fields__ if name != "fill"]
        texts += list(glyphs.fill.values())
        for text in texts:
            assert all(Look(DARK, glyphs) and len(character) == 1 for character in text)
            if glyphs is ASCII:
                assert text.isascii()
    assert len(UNICODE.eighths) == len(UNICODE.rises) == len(ASCII.eighths) == len(ASCII.rises) == 9


def test_palette_and_glyphs_follow_the_terminal() -> None:
    assert choose_palette(no_color=True, colours="truecolor") is MONO
    assert choose_palette(no_color=False, colours="standard") is ANSI16
    assert choose_palette(no_color=False, colours="256") is DARK
    assert choose_glyphs("utf-8") is UNICODE
    assert choose_glyphs("ascii") is ASCII
    assert choose_glyphs("latin-1") is ASCII
    assert choose_glyphs("no-such-encoding") is ASCII


def test_every_palette_gives_the_stock_widgets_a_theme() -> None:
    for palette in PALETTES.values():
        theme = textual_theme(palette)
        assert theme.name == palette.name
        assert theme.ansi is (palette.depth < 24)
