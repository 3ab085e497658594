"""What goes wrong in a simulation: sites that are lost, slow or hostile. A federation of real sites needs none of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Client = Annotated[int, Field(ge=0)]


class FaultsSection(BaseModel):
    """All simulated; a run that has any says so in its events, results and report."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dropout: float = Field(
        0.0, ge=0, lt=1, description="simulated: chance that an asked site does not answer in the round"
    )
    slow: tuple[Client, ...] = Field((), description="simulated: numbers of the sites that are slow")
    slowdown: float = Field(
        10.0, ge=1, description="simulated: a slow site takes this many times as long as a normal one"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="simulated: answers slower than this multiple of a normal site's time are dropped; null waits for every site",
    )
    attack: Literal["none", "flip", "trigger"] = Field(
        "none",
        description="simulated: flip, attackers call each class the next one of its task; trigger, they call every class the "
        "first of its task and paint a white square on it",
    )
    attackers: tuple[Client, ...] = Field((), description="simulated: numbers of the sites that attack")

    @model_validator(mode="after")
    def _someone_attacks(self) -> FaultsSection:
        if (self.attack == "none") != (not self.attackers):
            raise ValueError(
                "attack and attackers go together: federation.faults.attack=flip federation.faults.attackers=[0]"
            )
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """What is simulated, for people."""
        told = []
        if self.attack != "none":
            told.append(f"attack: {self.attack} by {_sites(self.attackers)}")
        if self.dropout:
            told.append(f"{100 * self.dropout:g} % of the sites lost per round")
        if self.slow:
            told.append(f"{_sites(self.slow)} {self.slowdown:g} times as slow")
        if self.deadline is not None:
            told.append(f"deadline after {self.deadline:g} times an ordinary answer")
        return tuple(told)


def _sites(clients: tuple[int, ...]) -> str:
    return f"{'site' if len(clients) == 1 else 'sites'} {', '.join(map(str, clients))}"
