"""What identifies people: addresses and numbers in a text, found by patterns of our own, and masked."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from typing import ClassVar, Literal

from archlab.search.data.cleaning.stages import CleaningStage, Step, Verdict

Kind = Literal["email", "ip", "phone"]

_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,24}(?![\w-])", re.I)
_IPV4 = r"(?:\d{1,3}\.){3}\d{1,3}"
_IPV6 = r"(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}"
_IP = re.compile(rf"(?<![\w.:])(?:{_IPV4}(?!\w|\.\d)|{_IPV6}(?![\w:]|\.\d))", re.I)
_ABROAD = r"\+[1-9]\d{0,2}(?:[ .-]?\(?\d{1,4}\)?){2,5}"  # +49 30 1234567, +1 (212) 555-0100
_NORTH_AMERICA = r"(?:\([2-9]\d\d\) ?|[2-9]\d\d[.-])\d{3}[.-]\d{4}"  # (212) 555-0100, 212-555-0100, 212.555.0100
_PHONE = re.compile(rf"(?<![\w+.-])(?:{_ABROAD}|{_NORTH_AMERICA})(?![\w-]|\.\d)")
_PATTERNS: dict[str, re.Pattern[str]] = {"email": _EMAIL, "ip": _IP, "phone": _PHONE}


@CleaningStage.register("mask")
class Mask(CleaningStage):
    """Replaces e-mail addresses, IP addresses and phone numbers by `<EMAIL>`, `<IP>` and `<PHONE>`.

    The patterns are archlab's own, checked by nothing but their form: IP addresses are those that Python's `ipaddress`
    accepts, phone numbers are those with a country code after `+` and 7 to 15 digits, and those in North American
    groups. Names, addresses of houses and numbers of documents are not looked for. `kinds` says which are masked.
    """

    group: ClassVar[str] = "pii"

    kinds: tuple[Kind, ...] = ("email", "ip", "phone")

    def start(self) -> Step:
        """Masks one document; the example that is kept is the text after masking."""

        def step(text: str) -> Verdict | None:
            found: Counter[str] = Counter()
            masked = text
            for kind in self.kinds:

                def mask(match: re.Match[str], kind: str = kind) -> str:
                    if not _is_one(kind, match[0]):
                        return match[0]
                    found[kind] += 1
                    return f"<{kind.upper()}>"

                masked = _PATTERNS[kind].sub(mask, masked)
            if not found:
                return None
            first = min(masked.find(f"<{kind.upper()}>") for kind in found)
            return Verdict(masked, dict(found), masked[max(first - 40, 0) :])

        return step


def _is_one(kind: str, text: str) -> bool:
    """Whether what has the form is one."""
    if kind == "phone":
        return not text.startswith("+") or 7 <= sum(map(str.isdigit, text)) <= 15
    if kind == "ip":
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return False
    return True
