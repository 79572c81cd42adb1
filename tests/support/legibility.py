"""What of a page can be read, as the browser that shows it has it."""

import re

# Texts on the page and what is behind them, of which the contrast is worked out here.
COLOURS = """[...document.querySelectorAll('body *')].filter((node) =>
  node.checkVisibility({visibilityProperty: true}) && !node.closest('.unseen, .repeated, option')
  && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())).map((node) => {
    const ground = (of) => getComputedStyle(of).backgroundColor;
    let behind = node;
    while (ground(behind) === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    return [node.className || node.localName, getComputedStyle(node).color, ground(behind)];
  })"""
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"


def contrast(one, other):
    """WCAG 2's ratio of two colours as `rgb(r, g, b)` or `color(srgb r g b)`."""

    def luminance(colour):
        scale = 1 if colour.startswith("color(srgb ") else 255
        parts = [float(part) / scale for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)
