"""A hundred JSON schemas of every kind, small enough for the demo model to finish: for tests of structured outputs."""

from typing import Any

Schema = dict[str, Any]
COLOURS = ["red", "green", "blue"]


def thing(required: list[str] | None = None, more: Any = False, **properties: Any) -> Schema:
    """An object with these properties; all of them are required unless some are named."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": more}


def text(most: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def listed(items: Any, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def tree(name: str, leaf: Schema, most: int) -> Schema:
    """A recursive schema: a node with a few nodes of its own."""
    node = thing(["value"], value=leaf, children={**listed({"$ref": f"#/$defs/{name}"}, 0, most)})
    return {"$ref": f"#/$defs/{name}", "$defs": {name: node}}


def _scalars() -> list[Schema]:
    found: list[Schema] = [{"type": "boolean"}, {"type": "null"}, {"const": "fixed"}, {"const": {"a": [1, 2]}}]
    found += [whole(low, low + span) for low, span in ((0, 9), (-5, 10), (100, 899), (-1000, 0), (7, 0), (1999, 102))]
    found += [{"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 99}, whole(0, 1000, multipleOf=25)]
    found += [
        {"type": "number", "minimum": low, "maximum": high} for low, high in ((0, 1), (-2.5, 2.5), (99.5, 100.25))
    ]
    found += [{"enum": COLOURS}, {"enum": [1, "one", True, None]}, {"enum": [[1], {"a": 2}, "x y"]}]
    found += [text(4), text(12, minLength=3), {"type": ["boolean", "null"]}, {"type": ["integer", "null"], "maximum": 5,
                                                                              "minimum": 0}]  # fmt: skip
    found += [{"type": "integer", "minimum": 12, "maximum": 12}, {"enum": [0.5, -1, 2e3]}, {"const": "two words"}]
    found += [whole(-90, 90, multipleOf=10), {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}]
    return found


def _patterns() -> list[Schema]:
    patterns = [
        "^[a-z]{3,8}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", "^[0-9]{4}-[0-9]{2}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$",
        "^\\+?[0-9]{3,12}$", "^[^\"\\\\]{2,6}$", "^a*b$", "^v[0-9]+\\.[0-9]+$", "^(ab|cd){1,3}$",
    ]  # fmt: skip
    found: list[Schema] = [{"type": "string", "pattern": pattern, "maxLength": 24} for pattern in patterns[:1]]
    found += [{"type": "string", "pattern": pattern} for pattern in patterns[2:5] + patterns[8:]]
    found += [thing(code={"type": "string", "pattern": pattern}) for pattern in (patterns[2], patterns[5], patterns[6])]
    found += [{"type": "string", "format": name} for name in ("date", "time", "ipv4", "uuid")]
    return found


def _objects() -> list[Schema]:
    person = thing(name=text(), age=whole(0, 120), married={"type": "boolean"})
    found = [person, thing(city={"enum": ["Paris", "Rome"]}, days=whole(1, 14)), thing(a=whole(0, 9), b=whole(0, 9))]
    found += [thing(["a"], **{name: whole(0, 9) for name in "abcd"[:count]}) for count in (2, 3, 4)]
    found += [thing(one=thing(two=thing(three=thing(four=whole(4, 4))))), thing(), thing([], x=text(3))]
    found += [thing(people=listed(person, 1, 2)), thing(owner=person, pets=listed(text(5), 0, 2))]
    found += [{"type": "object", "additionalProperties": whole(0, 9), "maxProperties": 2}]
    found += [thing(**{"key with spaces": text(4), 'quote"d': whole(0, 3), "ümlaut": {"type": "null"}})]
    found += [thing(**{f"field_{i}": value for i, value in enumerate(values)}) for values in (
        [{"type": "boolean"}] * 6, [whole(0, 99)] * 8, [{"enum": COLOURS}, text(3), whole(1, 2)] * 3,
        [{"type": "null"}] * 5,
    )]  # fmt: skip
    found += [thing(title={**text(6), "title": "Title", "description": "d", "default": "x", "examples": ["y"]})]
    return found


def _lists() -> list[Schema]:
    found = [listed(whole(0, 9), least, most) for least, most in ((0, 0), (1, 1), (0, 3), (3, 3), (2, 6))]
    found += [
        listed(item, 1, 2) for item in ({"enum": COLOURS}, text(4), listed(whole(0, 9), 2, 2), thing(x=whole(0, 9)))
    ]
    found += [
        {"type": "array", "prefixItems": [whole(0, 9), text(3), {"type": "boolean"}], "items": False, "minItems": 3}
    ]
    found += [{"type": "array", "prefixItems": [{"const": "head"}], "items": whole(0, 9), "minItems": 1, "maxItems": 4}]
    found += [listed({"const": "a"}, 4, 4), listed({"type": "boolean"}, 8, 12), listed({"type": "null"}, 0, 5)]
    found += [listed(listed(listed(whole(0, 1), 1, 2), 1, 2), 1, 2)]
    return found


def _unions() -> list[Schema]:
    cat, dog = (
        thing(kind={"const": "cat"}, lives=whole(1, 9)),
        thing(kind={"const": "dog"}, tricks=listed(text(4), 0, 1)),
    )
    found: list[Schema] = [{"anyOf": [whole(0, 9), {"type": "null"}]}, {"anyOf": [cat, dog]}, {"oneOf": [cat, dog]}]
    found += [thing(pet={"anyOf": [cat, dog, {"type": "null"}]}), listed({"anyOf": [cat, dog]}, 1, 2)]
    found += [
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
        {"anyOf": [{"const": i} for i in range(5)]},
    ]
    found += [{"anyOf": [thing(a=whole(0, 1)), thing(b=text(2)), listed({"type": "null"}, 0, 1)]}]
    found += [{"allOf": [thing(["a"], True, a=whole(0, 9)), thing(["b"], True, b=whole(0, 9))]}]
    found += [thing(**{name: {"anyOf": [whole(0, 9), {"enum": COLOURS}]} for name in names}) for names in ("ab", "xyz")]
    found += [{"anyOf": [text(2), whole(10, 12), {"type": "boolean"}]}]
    found += [thing(value={"type": ["string", "integer"], "maxLength": 3, "minimum": 0, "maximum": 9})]
    return found


def _references() -> list[Schema]:
    money = thing(amount=whole(1, 99), currency={"enum": ["EUR", "USD"]})
    found: list[Schema] = [tree("node", whole(0, 9), 1), tree("branch", {"enum": COLOURS}, 2), tree("t", text(2), 1)]
    found += [{**thing(price={"$ref": "#/$defs/money"}, tax={"$ref": "#/$defs/money"}), "$defs": {"money": money}}]
    chain = {"anyOf": [{"type": "null"}, thing(next={"$ref": "#/$defs/link"})]}
    found += [{"$ref": "#/$defs/link", "$defs": {"link": chain}}]
    even = {"anyOf": [{"const": 0}, thing(odd={"$ref": "#/$defs/odd"})]}
    found += [{"$ref": "#/$defs/even", "$defs": {"even": even, "odd": thing(even={"$ref": "#/$defs/even"})}}]
    return found


def _long() -> list[Schema]:
    found: list[Schema] = [{"enum": [f"value number {i}" for i in range(size)]} for size in (50, 500, 2000)]
    found += [{"anyOf": [{"const": f"option {i}"} for i in range(100)]}, listed({"enum": [*range(300)]}, 2, 3)]
    found += [thing([f"k{size - 1}"], **{f"k{i}": whole(0, 9) for i in range(size)}) for size in (10, 30)]
    found += [
        thing(**{f"section_{i}": thing(**{f"item_{j}": {"type": "boolean"} for j in range(3)}) for i in range(4)})
    ]
    return found


def schemas() -> list[Schema]:
    """Return all of them."""
    return [*_scalars(), *_patterns(), *_objects(), *_lists(), *_unions(), *_references(), *_long()]
