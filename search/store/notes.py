"""What people write beside studies and trials: a note and tags. Nothing that is computed depends on them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from archlab.search.store.kept import NOTES
from archlab.search.store.studies import Studies

TAG = re.compile(r"[\w.+-]{1,40}")
LONGEST = 20_000
"""Characters of a note."""
MOST_TAGS = 50
_KINDS = dict(zip(("study", "trial"), NOTES, strict=True))
"""Under which kind a store remembers them."""


@dataclass(frozen=True)
class Note:
    """A text, and tags in their order. Both may be empty."""

    text: str = ""
    tags: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tags)


@dataclass(frozen=True)
class Notes:
    """Those of a store: of `studies` by name, of `trials` by key, whichever studies want them."""

    studies: dict[str, Note]
    trials: dict[str, Note]


def checked(text: str, tags: Iterable[str]) -> Note:
    """The note of a text and tags, each tag once. Raises ValueError for a tag that a filter could not name, or for too
    much."""
    found = tuple(dict.fromkeys(filter(None, (tag.strip() for tag in tags))))
    for tag in found:
        if not TAG.fullmatch(tag):
            raise ValueError(f"tag {tag[:60]!r}: 1 to 40 letters, digits, '.', '_', '+' and '-' are allowed, no spaces")
    if len(found) > MOST_TAGS:
        raise ValueError(f"{len(found)} tags: {MOST_TAGS} at most")
    if len(text) > LONGEST:
        raise ValueError(f"a note of {len(text):,} characters: {LONGEST:,} at most")
    return Note(text.strip(), found)


def read_notes(store: Studies) -> Notes:
    """All notes of a store."""
    found = store.recall_all(_KINDS.values())
    by_name = {
        kind: {name: Note(kept["text"], tuple(kept["tags"])) for name, kept in found.get(place, {}).items()}
        for kind, place in _KINDS.items()
    }
    return Notes(by_name["study"], by_name["trial"])


def write_note(store: Studies, note: Note, study: str = "", trial: str = "") -> None:
    """Keeps the note of a study, by its name, or of a trial, by its key, in place of the one before."""
    kind, name = ("trial", trial) if trial else ("study", study)
    store.remember(_KINDS[kind], name, asdict(note))


def places_of(study: str, trials: Iterable[str]) -> list[tuple[str, str]]:
    """(kind, key) under which a store remembers the notes of a study and of trials."""
    return [(_KINDS["study"], study), *((_KINDS["trial"], key) for key in trials)]
