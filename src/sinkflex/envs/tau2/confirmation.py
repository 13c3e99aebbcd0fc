"""Whether the user's last word was a yes, for the metric that counts writes made without one."""

from __future__ import annotations

import re

_AGREES = re.compile(
    r"\b(?:yes|yep|yeah|sure|ok|okay|correct|right|confirm(?:ed)?|agreed|go ahead|please do|proceed|sounds good)\b"
)
_REFUSES = re.compile(r"\b(?:no|not|never|wrong|wait|\w+n['’]t)\b")


def confirms(text: str) -> bool:
    """Return whether an utterance says yes and nothing that takes it back."""
    lowered = text.lower()
    return _AGREES.search(lowered) is not None and _REFUSES.search(lowered) is None
