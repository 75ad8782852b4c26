"""Units behind a number: which are the same, and what is no unit at all."""

from __future__ import annotations

import re

_SYNONYMS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre mtr",
    "km": "kilometer kilometre kms",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo kgs",
    "lb": "pound lbs",
    "oz": "ounce",
    "ml": "milliliter millilitre mL",
    "l": "liter litre L",
    "s": "second sec",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "yr yrs",
    "deg": "degree",
    "rad": "radian",
    "dollar": "USD buck",
    "cent": "cents",
    "euro": "EUR",
    "yen": "JPY",
    "rupee": "rs Rs",
    "hz": "hertz Hz",
    "n": "newton N",
    "j": "joule J",
    "w": "watt W",
    "v": "volt V",
    "k": "kelvin K",
    "pa": "pascal Pa",
    "mol": "mole",
    "percent": "percentage pct",
}
_UNITS = {word: unit for unit, words in _SYNONYMS.items() for word in (unit, *words.split())}
_WHOLE = {"mph": "mi/h", "kmh": "km/h", "kmph": "km/h", "kph": "km/h", "mps": "m/s", "cc": "cm^3", "sqft": "ft^2"}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}

NOT_UNITS = frozenset(
    (
        *("or", "and", "to", "plus", "minus", "times", "over", "squared", "cubed", "factorial", "mod", "pi", "sqrt"),
        *("if", "where", "when", "for", "with", "not", "only", "below", "above", "at", "least", "most", "than", "less"),
        *("more", "about", "approximately", "through", "between", "is", "are", "be", "per"),
    )
)
"""Words that say something about a number instead of what is counted."""
MULTIPLIERS = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12},
}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_WORD = re.compile(r"(?P<word>[^\W\d_]+)(?:\^?\{?(?P<power>-?\d)\}?)?")


def unit_name(text: str) -> str | None:
    """One name for all spellings of a unit, such as `cm^2` for `square centimeters`; None where it is not known."""
    words = text.strip().strip(".").replace("²", "^2").replace("³", "^3")
    if words.lower() in _WHOLE:
        return _WHOLE[words.lower()]
    words = re.sub(r"\bper\b", "/", words)
    parts = [_product(part) for part in words.split("/")]
    return "/".join(part for part in parts if part) if all(parts) else None


def counts_something(text: str) -> bool:
    """Whether the words behind a number can only say what is counted: `apples`, but not `or more` or `million`."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return bool(words) and not any(word in NOT_UNITS or word in MULTIPLIERS for word in words)


def _product(text: str) -> str | None:
    names: list[str] = []
    raised = ""
    for match in _WORD.finditer(text):
        word = match["word"]
        if word.lower() in _POWERS:
            raised = _POWERS[word.lower()]
            continue
        name = _UNITS.get(word) or _UNITS.get(word.lower()) or _UNITS.get(word.lower().removesuffix("s"))
        if name is None:
            return None
        power = f"^{match['power']}" if match["power"] else raised
        names.append(name + (power if power != "^1" else ""))
        raised = ""
    return "·".join(names) or None
