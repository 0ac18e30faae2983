"""Change JSON somewhere, and check that a reader accepts the change or refuses it clearly."""

import contextlib
import json
import re

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
NUMBERS = st.integers(-3, 300) | st.integers(-(2**70), 2**70)


@st.composite
def mutated(draw, document):
    """Sample a change of a document: replace, remove or add JSON at some place."""
    document = json.loads(json.dumps(document))
    held, key = document, draw(st.sampled_from(sorted(document)))
    while isinstance(held[key], (dict, list)) and held[key] and draw(st.integers(0, 3)):
        held = held[key]
        key = draw(st.sampled_from(sorted(held) if isinstance(held, dict) else range(len(held))))
    change = draw(st.sampled_from(("replace", "number", "delete", "add", "copy")))
    if change == "delete":
        del held[key]
    elif change == "add" and isinstance(held, dict):
        held[draw(st.text(max_size=4))] = draw(JSON)
    elif change == "copy":
        others = list(held.values() if isinstance(held, dict) else held)
        held[key] = draw(st.sampled_from(others))
    else:
        held[key] = draw(NUMBERS if change == "number" else JSON)
    return document


def accepts(read, path, op="check_checkpoint"):
    """Return whether ``read`` accepts a file; a refusal must name rule, actual value, remedy."""
    try:
        read(path)
    except (ValueError, NotImplementedError) as error:
        message = str(error)
    else:
        return True
    assert re.match(rf"(?s){op}: .* must .+, got .*\. \w.*\.$", message), message
    return False


@contextlib.contextmanager
def restored(file):
    """Yield the bytes of a file, and restore the file afterwards."""
    whole = file.read_bytes()
    try:
        yield whole
    finally:
        file.write_bytes(whole)
