"""An observer: the length of the model's weights after each round, in the run folder as norms.json.

rescene run smoke --plugin examples/weight_norms.py
"""

import json

import rescene


@rescene.register_observer
class WeightNorms(rescene.Observer):
    """``norms`` has one number for each round; the checkpoint keeps them, so a resumed run has them all."""

    def __init__(self):
        self.norms = []

    def end_round(self, run):
        weights = [value for value in run.state.model.values() if value.is_floating_point()]
        self.norms.append(sum(float(value.square().sum()) for value in weights) ** 0.5)

    def end_run(self, run, results):
        (run.folder / "norms.json").write_text(json.dumps(self.norms))
        run.note(f"the weights grew from {self.norms[0]:.2f} to {self.norms[-1]:.2f}")

    def state(self):
        return {"norms": self.norms}

    def restore(self, state):
        self.norms = state["norms"]
