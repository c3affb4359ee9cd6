"""The grammar of the tags that mark details in the scripts.

Scripts log their tags by themselves, with a simpler expression, since each stands alone.

    # Detail 8/37: title (setting, not another) [source]
    # A sentence that says why.

A statement that stands for two details has both numbers, `Detail 9/37, R19`, and one title. In
place of `Detail 8/37` there may be `Extra` or `Deviation`. Settings, source and sentence may be
missing; a remark may stand behind the settings.
"""

import re
from typing import NamedTuple

TAG = re.compile(
    r" *# (?:Detail (\w+(?:/\d+)?(?:, \w+(?:/\d+)?)?)|(Extra|Deviation)): ([^([]+?)"
    r"(?: \((.+?)\)(?:, [^[]+)?)?(?: \[(.+)\])?"
)
LIKE_A_TAG = re.compile(r" *# (Detail|Extra|Deviation)\b")
SENTENCE = re.compile(r" *# (.+)")


class Tag(NamedTuple):
    """A tag, and the sentence below it."""

    line: int  # counted from 1
    kind: str  # Detail, Extra or Deviation
    number: str  # 8/37, or 9/37, R19; empty if it is no detail
    title: str
    settings: list[str]  # as written: `not x` is one that is off
    source: str
    sentence: str

    @property
    def anchor(self) -> str:
        """Where the script's page on the site has its note."""
        if self.number:
            return f"detail-{self.number.partition('/')[0].lower()}"
        return slug(f"{self.kind} {self.title}")


def slug(text: str) -> str:
    """A title as an anchor."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")


def tags_of(text: str) -> list[Tag]:
    """The tags of a script, in their order; a ValueError if one is malformed."""
    found, lines = [], [*text.splitlines(), ""]
    for index, line in enumerate(lines):
        if not LIKE_A_TAG.match(line):
            continue
        if not (match := TAG.fullmatch(line)):
            raise ValueError(f"Malformed: {line.strip()}")
        number, kind, title, settings, source = match.groups()
        below = lines[index + 1]
        sentence = SENTENCE.fullmatch(below) if not LIKE_A_TAG.match(below) else None
        found.append(
            Tag(
                *(index + 1, kind or "Detail", number or "", title),
                *(settings.split(", ") if settings else [], source or ""),
                sentence[1] if sentence else "",
            )
        )
    return found
