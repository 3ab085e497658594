"""The recipe: everything that defines an experiment. A key is spelled the same in Python, in YAML and in the record."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rescene.config.faults import FaultsSection
from rescene.config.plan import SitesSection
from rescene.config.privacy import PrivacySection, Promise, promise_of
from rescene.lens import no_such_lens
from rescene.methods import Method, method_class, method_names
from rescene.privacy.totals import threshold
from rescene.steps import Training
from rescene.versions import as_it_was


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSection(Section):
    name: str = Field("auto", description="data set, or auto: detect from the path; without a path, fashion-mini")
    path: str | None = Field(None, description="folder or file that holds the images")
    image_size: int | None = Field(None, ge=8, description="side in pixels; other sizes are resized")
    test_fraction: float = Field(0.2, gt=0, lt=1, description="held out per class where the data has no test split")
    seed: int = Field(
        0, ge=0, description="chooses that hold-out; apart from the run's seed, so that runs stay comparable"
    )
    skip_unreadable: bool = Field(False, description="leave out images that cannot be read instead of stopping")
    layout: Literal["auto", "classes", "domains"] = Field(
        "auto", description="what the first folders are, where the folders do not tell; auto: asks if in doubt"
    )
    outside: Literal["warn", "refuse"] = Field(
        "warn", description="images that a link or a CSV names outside of the folder; at a site: refuse"
    )


class TasksSection(Section):
    scenario: Literal["class", "domain"] = Field("class", description="new classes, or new domains of the same classes")
    per_task: int | None = Field(None, ge=1, description="classes per task; the last task takes the remainder")
    count: int | None = Field(None, ge=1, description="number of tasks of equal size")
    sizes: list[int] | None = Field(None, description="classes of each task")
    plan: list[list[str]] | None = Field(None, description="classes of each task by name")
    order: Literal["natural", "seeded"] = Field("natural", description="order in which classes arrive")
    limit: int | None = Field(None, ge=1, description="stop after this many tasks")
    drift: int | None = Field(
        None,
        ge=0,
        description="open-ended: rounds over which each task's classes drift in; no method is told; null: announced",
    )


class FederationSection(Section):
    num_clients: int = Field(20, ge=1, description="N, sites in all")
    per_round: int = Field(10, ge=1, description="K, sites that take part in a round")
    num_rounds: int = Field(20, ge=1, description="R, rounds per task")
    exclude: list[int] | None = Field(
        None, description="numbers of sites that are never asked: they left, or never came; others keep their images"
    )
    partition: Literal["capped", "dirichlet", "iid", "lazy-dirichlet"] = Field(
        "capped", description="how a task's images are split over sites; lazy-dirichlet: drawn on demand, sites overlap"
    )
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration: small means skewed")
    min_size: int = Field(
        1,
        ge=0,
        description="redraw the split until every site has this many images of a task; lazy: draw so many, above 1",
    )
    quorum: float = Field(0.5, ge=0, le=1, description="share of the asked sites that must answer")
    retries: int = Field(3, ge=0, description="how often a round without quorum is held again, with other sites")
    faults: FaultsSection = FaultsSection()
    screen: Literal["none", "features"] = Field(
        "none",
        description="features: what a site sends of a class and that lies far from what the others sent is quarantined",
    )
    engine: Literal["batched", "one-by-one", "debug"] = Field("batched", description="how sites are simulated")
    wire: Literal["float32", "float16", "uint8"] = Field("float32", description="how pictures travel to the server")
    evaluate_every: int = Field(1, ge=0, description="rounds between evaluations; 0: only after each task")


class ModelSection(Section):
    name: str = Field("resnet18", description="resnet18, resnet50, vit-small, convnet, mlp or linear")
    norm: Literal["batch", "group"] = "batch"
    width: int | None = Field(None, ge=1, description="base channels of convnet, hidden units of mlp")
    lens: str | None = Field(
        None,
        description="what every image is looked at through first: leaves, waves, the file of a lens (.safetensors, .onnx) or "
        "timm:NAME@CHECKPOINT; with linear or mlp",
    )
    init: str | None = Field(
        None, description="safetensors file of a model to start from: its body, and its classes by name"
    )


class Recipe(Section):
    """A complete, validated experiment. ``method`` holds the chosen method's own hyperparameters and its ``name``."""

    data: DataSection = DataSection()
    tasks: TasksSection = TasksSection()
    federation: FederationSection = FederationSection()
    model: ModelSection = ModelSection()
    method: dict[str, Any] = {"name": "rescene"}
    train: Training = Training()
    privacy: PrivacySection = PrivacySection()
    sites: SitesSection | None = Field(
        None, description="images live at the sites: the federation's plan, in the place of data and tasks"
    )
    seed: int = Field(0, ge=0)
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")

    @model_validator(mode="before")
    @classmethod
    def _steps_on_pixels(cls, values: Any) -> Any:
        """Of fixed length, unless something else is said, in records that knew no other and under a mechanism: it hides the loss."""
        if not isinstance(values, dict):
            return values
        values = as_it_was(values)
        given, private = values.get("method", {"name": "rescene"}), values.get("privacy")
        kind = private.get("mechanism", "none") if isinstance(private, dict) else getattr(private, "mechanism", "none")
        if kind != "none" and isinstance(given, dict):
            method = method_class(str(given.get("name", "rescene")))
            return values | {"method": {"step": "fixed"} | given} if "step" in method.model_fields else values
        return values

    @field_validator("method")
    @classmethod
    def _complete_method(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Fill in every hyperparameter of the method, so that the record shows what ran."""
        given = {key: v for key, v in value.items() if key != "name"}
        method = method_class(str(value.get("name", "rescene")))
        return {"name": method.name, **method(**given).model_dump(exclude={"train"})}

    @model_validator(mode="after")
    def _method_can_do_it(self) -> Recipe:
        method = method_class(self.method["name"])
        if self.tasks.scenario not in method.scenarios:
            raise ValueError(
                f"tasks.scenario: {method.title} cannot learn {self.tasks.scenario}-incremental tasks, "
                f"only {' and '.join(method.scenarios)}"
            )
        return self

    @model_validator(mode="after")
    def _participants_exist(self) -> Recipe:
        if self.federation.per_round > self.federation.num_clients:
            raise ValueError(
                f"federation.per_round: {self.federation.per_round} sites cannot take part in a round, "
                f"federation.num_clients has only {self.federation.num_clients}"
            )
        return self

    @model_validator(mode="after")
    def _faults_fit(self) -> Recipe:
        faults, method = self.federation.faults, method_class(self.method["name"])
        last = max((*faults.slow, *faults.attackers), default=0)
        if last >= self.federation.num_clients:
            raise ValueError(
                f"federation.faults: there is no site {last}, federation.num_clients is {self.federation.num_clients}"
            )
        if self.federation.screen != "none" and not method.sends_pictures_only:
            raise ValueError(f"federation.screen: {method.title} sends more than pictures, or none; screen=none")
        if self.federation.screen != "none" and self.privacy.pool:
            raise ValueError(
                "federation.screen: sums that are added up hide who sent what; screen=none, or privacy.pool=false"
            )
        return self

    @model_validator(mode="after")
    def _somebody_is_left(self) -> Recipe:
        gone, num_clients = self.federation.exclude or [], self.federation.num_clients
        if len(set(gone)) != len(gone) or not all(0 <= client < num_clients for client in gone):
            raise ValueError(f"federation.exclude: {gone} must name sites of 0 to {num_clients - 1}, each once")
        if len(gone) == num_clients:
            raise ValueError("federation.exclude: no site is left")
        return self

    @model_validator(mode="after")
    def _mechanism_fits_method(self) -> Recipe:
        method, kind = method_class(self.method["name"]), self.privacy.mechanism
        if kind not in method.mechanisms:
            reason = method.unprotected or f"it also sends what {kind} does not cover ({method.leaves_site})"
            raise ValueError(
                f"privacy.mechanism: {method.title} cannot use {kind}: {reason}; it can use: {', '.join(method.mechanisms)}"
            )
        of_weights = kind == "dp-sgd" or (kind == "paper-experiment" and "dp-sgd" in method.mechanisms)
        if of_weights and self.model.norm == "batch" and self.model.name not in ("vit-small", "mlp"):
            raise ValueError(
                f"model.norm: under {kind} each image needs a gradient of its own, but BatchNorm mixes the images of a batch "
                "and sends their statistics without noise; model.norm=group"
            )
        if kind == "dp-sgd" and self.method.get("budget_scope") == "global":
            raise ValueError(
                "method.budget_scope: a budget over all sites needs every image's score on the server, which dp-sgd does "
                "not cover; method.budget_scope=client"
            )
        starts = {"release": ("noise", "coloured"), "per-example": ("noise",)}.get(kind)
        if starts and self.method.get("start", starts[0]) not in starts:
            raise ValueError(
                f"method.start: under {kind} surrogates may not start from the images; method.start={' or '.join(starts)}"
            )
        if kind == "release" and self.method.get("start") == "coloured" and self.method["num_steps"]:
            raise ValueError(
                "method.num_steps: released moments of pictures hold no features to descend to; method.num_steps=0"
            )
        if self.privacy.pool and self.method.get("start") != "coloured":
            raise ValueError("privacy.pool: sums are pooled for method.start=coloured only; privacy.pool=null")
        keeps_pictures = method.can_forget and not method.forgets_exactly
        if self.privacy.centre == "released" and not keeps_pictures:
            raise ValueError(f"privacy.centre: {method.title} keeps nothing from earlier rounds; privacy.centre=none")
        if kind == "per-example" and not self.method["num_steps"]:
            raise ValueError("method.num_steps: per-example needs at least one step")
        if kind in ("per-example", "paper-experiment") and self.method.get("step") == "polyak":
            raise ValueError(
                f"method.step: under {kind} the length of a step must not depend on the loss, which is private; method.step=fixed"
            )
        if kind == "paper-experiment" and self.method.get("clip", 5) is None:
            raise ValueError("method.clip: the paper's experiment clips each class's gradient; method.clip=5")
        return self

    @model_validator(mode="after")
    def _sums_are_secure(self) -> Recipe:
        honest, method, federation = self.privacy.honest_sites, method_class(self.method["name"]), self.federation
        if honest is None:
            return self
        if not method.sums_securely:
            able = ", ".join(n for n in method_names() if method_class(n).sums_securely) or "none of the methods here"
            raise ValueError(
                f"privacy.honest_sites: {method.title} sends what cannot be added up over sites; "
                f"privacy.honest_sites=null, or one of: {able}"
            )
        there = federation.num_clients - len(federation.exclude or ())
        least = threshold(federation.num_clients, federation.quorum, honest)
        if least > there:
            raise ValueError(
                f"privacy.honest_sites: a sum needs {least} sites (federation.quorum={federation.quorum:g} of "
                f"federation.num_clients={federation.num_clients}, and no fewer than honest_sites={honest}), "
                f"and only {there} are there"
            )
        return self

    @model_validator(mode="after")
    def _lens_fits(self) -> Recipe:
        if self.model.lens is None:
            return self
        method = method_class(self.method["name"])
        if fault := no_such_lens(self.model.lens):
            raise ValueError(f"model.lens: {fault}")
        if self.train.augment:
            raise ValueError(
                "train.augment: through a lens crops and mirror images are not those of the picture; train.augment=false"
            )
        if method.paints or self.method.get("start") == "leaves":
            raise ValueError(f"model.lens: {method.title} paints pictures with three channels here; model.lens=null")
        return self

    @model_validator(mode="after")
    def _drift_is_possible(self) -> Recipe:
        drift, method = self.tasks.drift, method_class(self.method["name"])
        if drift is None:
            return self
        if self.sites is not None or self.tasks.scenario != "class":
            raise ValueError("tasks.drift: only a simulation can let classes drift in, and only classes")
        if drift >= self.federation.num_rounds:
            raise ValueError(
                f"tasks.drift: {drift} rounds of drift leave none of a task's {self.federation.num_rounds} to its own classes"
            )
        if not method.open_ended:
            raise ValueError(
                f"tasks.drift: {method.title} must be told when a task begins or ends, and here nobody says so; "
                f"tasks.drift=null, or one of {', '.join(n for n in method_names() if method_class(n).open_ended)}"
            )
        if self.privacy.mechanism != "none":
            raise ValueError(
                "tasks.drift: an image stays longer than one task, which the mechanism does not reckon with; "
                "privacy.mechanism=none"
            )
        return self

    @model_validator(mode="after")
    def _plan_fits(self) -> Recipe:
        if self.sites is None:
            return self
        if self.tasks.scenario != "class":
            raise ValueError("tasks.scenario: with images at the sites tasks bring classes, not domains")
        method = method_class(self.method["name"])
        if method.needs_mechanism and self.privacy.mechanism == "none":
            raise ValueError(
                f"privacy.mechanism: {method.title} sends exact sums without one, from which images can be solved for, so it runs in "
                "simulations only; privacy.mechanism=release privacy.epsilon=8 privacy.clip=1 privacy.covariance_weight=2"
            )
        longest = max(task.rounds for task in self.sites.tasks)
        if self.privacy.mechanism != "none" and longest > self.federation.num_rounds:
            raise ValueError(
                f"sites.tasks: a task of {longest} rounds, but the noise is reckoned for {self.federation.num_rounds}"
            )
        return self

    @property
    def images(self) -> DataSection:
        """``data``; a run by domain has said what the first folders are."""
        by_domain = self.tasks.scenario == "domain" and self.data.layout == "auto"
        return self.data.model_copy(update={"layout": "domains"}) if by_domain else self.data

    def rounds_of(self, task: int) -> int:
        return self.federation.num_rounds if self.sites is None else self.sites.tasks[task].rounds

    def without(self, client: int) -> Recipe:
        """The recipe in which this site is never asked."""
        gone = sorted({*(self.federation.exclude or ()), client})
        federation = self.federation.model_dump(mode="json") | {"exclude": gone}
        return Recipe.model_validate(self.model_dump(mode="json") | {"federation": federation})

    def closing(self, task: int, rounds: int) -> Recipe:
        """The recipe whose plan had only so many rounds in this task."""
        assert self.sites is not None
        return self.model_copy(update={"sites": self.sites.closing(task, rounds)})

    def promise(self, num_tasks: int) -> Promise | None:
        """What the mechanism guarantees over a run of this many tasks; None without one."""
        steps, clip = self.method.get("num_steps", 1), self.method.get("clip")
        if self.privacy.mechanism == "dp-sgd":
            steps = max(1, round(self.train.local_epochs / self.privacy.sampling_rate))  # E epochs in expectation
        rounds = self.federation.num_rounds
        method = method_class(self.method["name"])
        if self.privacy.mechanism == "release" and (method.releases_once or self.method.get("start") == "coloured"):
            rounds = 1  # what is released does not depend on the model: once per task
        used_in = num_tasks if method.reuses_records else 1
        return promise_of(self.privacy, rounds, steps, clip, used_in)

    def build_method(self) -> Method:
        given = {key: v for key, v in self.method.items() if key != "name"}
        return method_class(self.method["name"])(**given, train=self.train)
