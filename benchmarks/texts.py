"""Texts in the scripts that prompts are written in, made from fixed seeds: nothing is downloaded.

Each script is a function of a length in characters. A longer text begins with the shorter one's words, and says
something new to its end: texts that repeat themselves would be tokenized from a cache.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from itertools import count
from random import Random

_SEED = 36
# Most prompts in German have an umlaut every few words. Compounds are made below.
# fmt: off
_GERMAN = (
    "der", "die", "das", "und", "ist", "nicht", "mit", "für", "auf", "über", "nach", "durch", "Straße", "Prüfung",
    "Verträge", "größer", "können", "müssen", "während", "dafür", "Haus", "Arbeit", "Schlüssel", "Kündigung",
    "Frist", "Gebäude", "Übersicht", "Zähler", "Maßnahme", "Anhänge", "Lösung", "Stück", "Gerät", "Fläche", "Würde",
    "schließlich", "außerdem", "natürlich", "möglich", "wöchentlich", "prüfen", "öffnen", "ändern", "erklären",
    "gehört", "läuft", "fährt", "trägt", "heißt", "ein", "eine", "einen", "kein", "keine", "sehr", "noch", "schon",
    "wieder", "immer", "heute", "morgen", "gestern", "bald", "selten", "unter", "zwischen", "gegen", "ohne",
    "Bericht", "Antrag", "Rechnung", "Versicherung", "Verwaltung", "Abteilung", "Leitung", "Entwicklung", "Zeitung",
    "Wohnung", "Zahlung", "Bestellung",
)
_CHINESE = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行学法所民得经"
    "十三之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形"
    "相全表间样与关各重新线内数正心反你明看原又么利比或但质气第向道命此变条只没结解问意建月公无系军很情者最立代想已通并提直题党程展五"
)
_EMOJI = ("😀", "🚀", "👍🏽", "👩‍💻", "🇩🇪", "❤️", "🎉", "🔧", "🧪", "📈")
_CODE_NAMES = (
    "index", "worker", "block", "prefix", "request", "token", "adapter", "engine", "replica", "digest", "window",
    "budget", "lease", "policy",
)
# fmt: on


@cache
def english_words() -> tuple[str, ...]:
    """The words of an English text, in its order."""
    text = resources.files("lorafleet.local").joinpath("tiny_corpus.txt").read_text(encoding="utf-8")
    prose = text.partition("# prose")[2].partition("\n# ")[0]
    return tuple(prose.split())


def english(chars: int) -> str:
    """Prose of ASCII alone."""
    rng = Random(_SEED)
    return _filled(chars, lambda: f"{' '.join(rng.choices(english_words(), k=12))} {rng.randrange(1000)}. ")


def curly(chars: int) -> str:
    """The English text with one curly quote in its middle."""
    text = english(chars)
    return f"{text[: chars // 2]}\u2019{text[chars // 2 + 1 :]}"


def code(chars: int) -> str:
    """Python functions: indented, with names, numbers and operators."""
    rng, numbers = Random(_SEED), count()

    def function() -> str:
        one, two, three = rng.choices(_CODE_NAMES, k=3)
        return (
            f"def {one}_{two}_{next(numbers)}({two}: int, {three}: list[str]) -> dict[str, float]:\n"
            f'    """The {one} of each {three}."""\n'
            f"    if not {three} or {two} >= {rng.randrange(10_000)}:\n"
            f'        raise ValueError(f"{{{two}!r}} is beyond {one}s[{rng.randrange(99)}]")\n'
            f"    return {{name: {two} * {rng.random():.4f} for name in sorted({three})}}\n\n\n"
        )

    return _filled(chars, function)


def json_lines(chars: int) -> str:
    """Records as a tool returns them, one a line."""
    rng, numbers = Random(_SEED), count(1)

    def record() -> str:
        fields = {
            "id": f"{rng.getrandbits(64):016x}",
            "number": next(numbers),
            "name": " ".join(rng.choices(english_words(), k=2)),
            "tags": rng.choices(_CODE_NAMES, k=3),
            "score": round(rng.random(), 6),
            "is_active": rng.random() < 0.5,
            "parent": None,
        }
        return json.dumps(fields) + "\n"

    return _filled(chars, record)


def german(chars: int) -> str:
    """Words of which many have an umlaut, and compounds."""
    rng = Random(_SEED)

    def word() -> str:
        one = rng.choice(_GERMAN)
        return one + rng.choice(_GERMAN).lower() if one[0].isupper() and rng.random() < 0.2 else one

    return _filled(chars, lambda: f"{' '.join(word() for _ in range(10))} {rng.randrange(1000)}. ")


def chinese(chars: int) -> str:
    """Characters without spaces, and full-width stops."""
    rng = Random(_SEED)
    return _filled(chars, lambda: "".join(rng.choices(_CHINESE, k=rng.randrange(6, 18))) + rng.choice("。、"))


def emoji(chars: int) -> str:
    """English with an emoji every eight words, some of several code points."""
    rng = Random(_SEED)
    return _filled(chars, lambda: f"{' '.join(rng.choices(english_words(), k=8))} {rng.choice(_EMOJI)} ")


SCRIPTS: dict[str, Callable[[int], str]] = {
    "English": english,
    "English, one curly quote": curly,
    "code": code,
    "JSON": json_lines,
    "German": german,
    "Chinese": chinese,
    "English with emoji": emoji,
}


def _filled(chars: int, piece: Callable[[], str]) -> str:
    parts: list[str] = []
    length = 0
    while length < chars:
        parts.append(piece())
        length += len(parts[-1])
    return "".join(parts)[:chars]


def turns(text: str, chars: int, mark: str = "") -> Sequence[str]:
    """The text cut into turns of so many characters, each behind the mark."""
    return [mark + text[start : start + chars] for start in range(0, len(text), chars)]
