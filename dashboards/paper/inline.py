"""A drawing as a part of a page: what an SVG may hold there, with ids that no other drawing has."""

from __future__ import annotations

import re
from xml.etree import ElementTree

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
TAGS = {
    *("svg", "g", "defs", "title", "desc", "path", "polygon", "polyline", "line", "rect", "circle", "ellipse"),
    *("text", "tspan", "use", "clipPath", "image", "linearGradient", "stop"),
}
_TO = re.compile(r"url\(#([^)]+)\)")


def inline(svg: bytes, prefix: str) -> str:
    """The `<svg>` element for an HTML page: no scripts, no styles, no links but to its own parts and embedded pictures.

    It is as wide as the page lets it be. Raises ValueError for what is no SVG.
    """
    root = ElementTree.fromstring(svg)
    if root.tag != f"{SVG}svg":
        raise ValueError(f"an SVG begins with svg, found {root.tag}")
    _clean(root)
    used = {to for element in root.iter() for to in _targets(element)}
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{prefix}-{own}")
        for name, value in list(element.attrib.items()):
            element.set(name, _TO.sub(rf"url(#{prefix}-\1)", value))
        if link := element.attrib.pop(LINK, None):
            element.set("href", f"#{prefix}-{link[1:]}" if link.startswith("#") else link)
    width = root.attrib.pop("width", "")
    root.attrib.pop("height", None)
    root.set("style", f"width:{width};stroke-linejoin:round;stroke-linecap:butt")
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    """Takes away what a picture does not need."""
    for child in list(element):
        if child.tag == f"{SVG}a":
            _unlink(child)
        if not isinstance(child.tag, str) or child.tag.removeprefix(SVG) not in TAGS:
            element.remove(child)
        else:
            _clean(child)
    for name in list(element.attrib):
        value = element.attrib[name]
        elsewhere = name.endswith("href") and not value.startswith(("#", "data:image/png"))
        if name.lower().startswith("on") or elsewhere or (name.startswith("{") and name != LINK):
            del element.attrib[name]


def _unlink(element: ElementTree.Element) -> None:
    """What was linked without the link; what it said when pointed at it still says."""
    said = element.get(LINK.replace("href", "title"))
    element.tag = f"{SVG}g"
    element.attrib.clear()
    if said:
        title = ElementTree.Element(f"{SVG}title")
        title.text = said
        element.insert(0, title)


def _targets(element: ElementTree.Element) -> list[str]:
    """The ids that an element speaks of."""
    found = [to for value in element.attrib.values() for to in _TO.findall(value)]
    link = element.get(LINK, element.get("href", ""))
    return [*found, link[1:]] if link.startswith("#") else found
