"""The docs use each word of the glossary, and no word that was dropped."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, ROOT

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
WORDS = re.findall(r"^\| ([^|]+?) \|", GLOSSARY.read_text(), re.MULTILINE)[1:]
#: What a person reads, except records of what was, and texts from elsewhere.
READ = [
    *(page for page in PAGES if page.parent not in (ROOT, ROOT / "docs" / "decisions")),
    ROOT / "README.md",
    *(ROOT / "django_txmsg").rglob("*.html"),
    *(
        path
        for path in (ROOT / "django_txmsg").rglob("*.py")
        if path.parent.name != "migrations"
    ),
]
#: Metaphors that were once names in the code.
DROPPED = re.compile(
    r"\b(?:anew|despair\w*|deaf|crew)\b",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def text() -> str:
    """Return all texts for readers, except the glossary itself."""
    return "\n".join(path.read_text() for path in READ if path != GLOSSARY)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_the_glossary_is_used(word: str, text: str) -> None:
    stem = word.removesuffix("y").removesuffix("e").replace(" ", "[ _]")

    assert re.search(rf"\b_?{stem}\w*", text, re.IGNORECASE)


def test_glossary_is_sorted_and_has_each_word_once() -> None:
    assert sorted({*WORDS}, key=str.lower) == WORDS


def test_dropped_words_are_in_no_code_page_or_template() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in READ
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DROPPED.search(line)
    ]

    assert found == []
