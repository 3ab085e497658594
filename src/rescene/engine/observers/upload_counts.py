"""What sites say of their uploads in ``notes``: images that fell back or stayed home, answers declined, classes suppressed."""

from __future__ import annotations

from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext
from rescene.methods import Uploads

COUNTED = ("num_fallbacks", "num_withheld", "num_declined", "num_suppressed")


class UploadCounts(Observer):
    """Adds them up in the run's facts, and writes events about images."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def uploads_received(self, run: RunView, uploads: Uploads) -> None:
        facts, note = self.context.facts, self.context.note
        counts = {name: sum(int(u.get("notes", {}).get(name, 0)) for u in uploads.values()) for name in COUNTED}
        for name, count in counts.items():
            setattr(facts, name, getattr(facts, name) + count)
        if withheld := counts["num_withheld"]:
            note("info", "I310", f"{withheld} surrogates were still real images of a small class and stayed home")
            if not any(len(u.get("images", ())) for u in uploads.values()):
                fix = "give each site more images of a class (federation.num_clients) or ask for fewer (method.ipc)"
                note("warning", "W311", f"no surrogate left any site, so the server learned nothing new: {fix}")
        if fallbacks := counts["num_fallbacks"]:
            note("warning", "W301", f"{fallbacks} surrogates became non-finite and fell back to their start image")
