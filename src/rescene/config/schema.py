"""The recipe: everything that defines an experiment. A key is spelled the same in Python, in YAML and in the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rescene.config.privacy import PrivacySection, promise_of
from rescene.config.site_sections import ChannelTriple, Deviation, FaultsSection, SitesSection
from rescene.core.errors import ConfigError, MethodCannot
from rescene.core.hyperparameters import Section
from rescene.core.versions import as_it_was
from rescene.lens import no_such_lens
from rescene.methods import DEFAULT_METHOD, Method, method_class, method_names
from rescene.nets import is_own, own_model
from rescene.nets.timm_networks import TIMM
from rescene.privacy.promise import Promise
from rescene.privacy.totals import most_colluders, threshold
from rescene.training import Training

PER_SITE = "per-site"  # tasks.order: each site has its own


class ColumnsSection(Section):
    """What the columns of a table of images are called; null: by their usual names."""

    path: str | None = Field(None, description="column of paths, or of the pictures themselves")
    label: str | None = Field(None, description="column of classes")
    split: str | None = Field(None, description="column that says train or test")
    domain: str | None = Field(None, description="column of domains")
    site: str | None = Field(None, description="column of sites")

    @property
    def given(self) -> dict[str, str]:
        return {role: name for role, name in self.model_dump().items() if name is not None}


class DataSection(Section):
    """``data.*``: which images, and how they are read."""

    name: str = Field(
        "auto", description="name of a data set; auto detects it from data.path, and takes fashion-mini without a path"
    )
    path: str | None = Field(None, description="folder or file that holds the images")
    more: list[str] | None = Field(
        None,
        description="further folders or files with images of other classes (or domains), such as those of a later month; "
        "all are normalised as the images of data.path",
    )
    image_size: int | None = Field(
        None, ge=8, description="side of the pictures in pixels; pictures of another size are resized"
    )
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="share of each class that is held out for testing, if the data has no test split"
    )
    seed: int = Field(
        0, ge=0, description="chooses the held-out images; runs with different seeds still share one test set"
    )
    held_out: Literal["drawn", "last"] = Field(
        "drawn",
        description="which images are held out: drawn at random, or the last of each class, files in the order of their names "
        "and arrays by position; last suits photographs that were taken in a row and resemble their neighbours",
    )
    skip_unreadable: bool = Field(
        False, description="true leaves out images that cannot be read; false stops at the first one"
    )
    validation: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="evaluate on this share of each class's training images, never on the test images: to choose settings",
    )
    layout: Literal["auto", "classes", "domains", "sites", "sites-domains"] = Field(
        "auto",
        description="what the first level of folders is; auto detects it and stops with a question if in doubt",
    )
    columns: ColumnsSection = ColumnsSection()
    mean: ChannelTriple | None = Field(
        None, description="mean of each channel for normalisation; null: that of the data set, or measured"
    )
    std: tuple[Deviation, Deviation, Deviation] | None = Field(
        None, description="standard deviation of each channel; null: that of the data set, or measured"
    )
    outside: Literal["warn", "refuse"] = Field(
        "warn",
        description="what to do with images outside the folder that a link or a CSV names; sites always refuse them",
    )


class TasksSection(Section):
    """``tasks.*``: how classes or domains arrive over time."""

    scenario: Literal["class", "domain"] = Field(
        "class",
        description="class: each task brings new classes; domain: each task brings a new domain of the same classes",
    )
    per_task: int | None = Field(None, ge=1, description="classes per task; the last task takes the remainder")
    count: int | None = Field(None, ge=1, description="number of tasks of equal size")
    sizes: list[int] | None = Field(None, description="number of classes of each task, such as [5, 2, 3]")
    plan: list[list[str]] | None = Field(
        None, description="names of the classes of each task; with scenario domain, the domain of each task"
    )
    order: Literal["natural", "seeded", "per-site"] = Field(
        "natural",
        description="order in which classes arrive: as in the data set, shuffled by the seed, or shuffled for each site",
    )
    limit: int | None = Field(None, ge=1, description="stop after this many tasks")
    drift: int | None = Field(
        None,
        ge=0,
        description="rounds over which each task's classes drift in, without telling the method; null: every task is announced",
    )

    def in_one_order(self) -> TasksSection:
        """The same tasks in one order for all sites."""
        return self.model_copy(update={"order": "natural"}) if self.order == PER_SITE else self


class FederationSection(Section):
    """``federation.*``: sites, rounds, how images are split, and how a round is run."""

    num_clients: int = Field(20, ge=1, description="N, number of sites")
    per_round: int = Field(10, ge=1, description="K, number of sites that take part in a round")
    num_rounds: int = Field(20, ge=1, description="R, number of rounds per task")
    exclude: list[int] | None = Field(
        None, description="numbers of sites that are never asked; the other sites keep the images they have"
    )
    partition: Literal["capped", "dirichlet", "iid", "lazy-dirichlet", "sites"] = Field(
        "capped",
        description="how a task's images are split over sites; lazy-dirichlet draws them on demand, and sites may share images; "
        "sites takes the sites that the data name, and num_clients follows",
    )
    beta: float = Field(0.5, gt=0, description="Dirichlet concentration: the smaller, the more the sites differ")
    min_size: int = Field(
        1,
        ge=0,
        description="images of a task that every site has at least (the split is redrawn); lazy-dirichlet gives each site so many",
    )
    quorum: float = Field(0.5, ge=0, le=1, description="share of the asked sites that must answer, from 0 to 1")
    retries: int = Field(3, ge=0, description="how often a round without a quorum is repeated with other sites")
    faults: FaultsSection = FaultsSection()
    delay: int = Field(
        0,
        ge=0,
        description="simulated: an answer arrives at most so many rounds late, drawn for each site and round; 0: all are on time",
    )
    staleness: int | None = Field(
        None, ge=0, description="answers that are more rounds late than this are dropped; null drops none"
    )
    staleness_exponent: float = Field(
        0.5, ge=0, description="the change of weights in an answer d rounds late counts (1 + d)^-a; this is a"
    )
    screen: Literal["none", "features"] = Field(
        "none",
        description="features: pictures of a class that lie far from what the other sites sent are left out of training",
    )
    engine: Literal["batched", "one-by-one", "debug"] = Field(
        "batched",
        description="how sites are simulated: together in one pass, one after the other, or so that the first failure stops the run",
    )
    wire: Literal["float32", "float16", "uint8"] = Field(
        "float32", description="number format of pictures on their way to the server"
    )
    evaluate_every: int = Field(1, ge=0, description="rounds between two evaluations; 0 evaluates after each task only")

    @property
    def simulated(self) -> tuple[str, ...]:
        """What is simulated to go wrong, for people."""
        late = f"answers up to {self.delay} {'round' if self.delay == 1 else 'rounds'} late"
        return (*self.faults.words, late) if self.delay else self.faults.words


class ModelSection(Section):
    """``model.*``: the network, and the lens before it."""

    name: str = Field(
        "resnet18",
        description="resnet18, resnet50, vit-small, vit-mini, convnet, mlp, linear, timm:NAME, or a network of a plug-in",
    )
    norm: Literal["batch", "group"] = Field("batch", description="normalisation layers of resnet and convnet")
    width: int | None = Field(
        None, ge=1, description="base channels of convnet, hidden units of mlp, numbers of a token of vit-mini"
    )
    lens: str | None = Field(
        None,
        description="frozen feature extractor in front of the network: leaves, waves, the file of a lens (.safetensors, .onnx) or "
        "timm:NAME@CHECKPOINT; needs model.name=linear or mlp",
    )
    init: str | None = Field(
        None,
        description="file to start from: a model's .safetensors (its body, and its classes by name), or a checkpoint of timm:NAME",
    )
    frozen: bool = Field(
        False, description="timm:NAME with its checkpoint as it is: a lens, of which only a linear head learns"
    )

    @model_validator(mode="before")
    @classmethod
    def _frozen_is_a_lens(cls, values: Any) -> Any:
        """A frozen backbone is the same network as a lens, and a linear head: the record says so."""
        if not isinstance(values, dict) or values.get("frozen") is not True or values.get("lens"):
            return values
        name = str(values.get("name", ""))
        if not name.startswith(TIMM) or not values.get("init"):
            raise ValueError("frozen needs model.name=timm:NAME and its checkpoint, model.init=FILE")
        return values | {"name": "linear", "lens": f"{name}@{values['init']}", "init": None}


class MethodLimit(ValueError):
    """Why the recipe contradicts itself: the method cannot do what another key asks for (``MethodCannot`` for people)."""


class Recipe(Section):
    """A complete, validated experiment. ``method`` holds the chosen method's own hyperparameters and its ``name``."""

    data: DataSection = DataSection()
    tasks: TasksSection = TasksSection()
    federation: FederationSection = FederationSection()
    model: ModelSection = ModelSection()
    method: dict[str, Any] = {"name": DEFAULT_METHOD}
    train: Training = Training()
    privacy: PrivacySection = PrivacySection()
    sites: SitesSection | None = Field(
        None, description="plan of a federation whose images stay at the sites; it replaces data and tasks"
    )
    seed: int = Field(
        0, ge=0, description="seed of everything random in the run; the noise of a privacy mechanism ignores it"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")

    @model_validator(mode="before")
    @classmethod
    def _steps_on_pixels(cls, values: Any) -> Any:
        """Use ``fixed`` steps for old records and under a privacy mechanism, because Polyak steps would reveal the private loss."""
        if not isinstance(values, dict):
            return values
        values = as_it_was(values)
        given, private = values.get("method", {"name": DEFAULT_METHOD}), values.get("privacy")
        kind = private.get("mechanism", "none") if isinstance(private, dict) else getattr(private, "mechanism", "none")
        if kind != "none" and isinstance(given, dict):
            method = method_class(given.get("name", DEFAULT_METHOD))
            return values | {"method": {"step": "fixed"} | given} if "step" in method.model_fields else values
        return values

    @field_validator("method")
    @classmethod
    def _complete_method(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Fill in every hyperparameter of the method, so that the record shows what ran."""
        given = {key: v for key, v in value.items() if key != "name"}
        method = method_class(value.get("name", DEFAULT_METHOD))
        return {"name": method.name, **method(**given).model_dump(exclude={"train"})}

    @model_validator(mode="after")
    def _method_can_do_it(self) -> Recipe:
        method = method_class(self.method["name"])
        if self.tasks.scenario not in method.scenarios:
            raise MethodLimit(
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
            raise MethodLimit(f"federation.screen: {method.title} sends more than pictures, or none; screen=none")
        if self.federation.screen != "none" and self.privacy.pool:
            raise ValueError(
                "federation.screen: sums that are added up hide who sent what; screen=none, or privacy.pool=false"
            )
        return self

    @model_validator(mode="after")
    def _late_answers_are_possible(self) -> Recipe:
        method, where = method_class(self.method["name"]), f"federation.delay={self.federation.delay}"
        if not self.federation.delay:
            return self
        if not method.late_verbs:
            able = ", ".join(name for name in method_names() if method_class(name).late_verbs)
            what = f"{method.title} cannot learn from answers that come rounds later"
            why = "what a site answers belongs to the round and the task in which it was asked, or nobody has shown otherwise"
            raise MethodCannot("E573", what, where=where, why=why, fix=f"federation.delay=0, or method=one of {able}")
        if self.privacy.mechanism != "none":
            what = f"federation.delay with privacy.mechanism={self.privacy.mechanism} is not possible"
            why = "the budget of an answer that is dropped would be spent, and nobody accounts for that"
            raise ConfigError("E574", what, where=where, why=why, fix="federation.delay=0, or privacy.mechanism=none")
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
            raise MethodLimit(
                f"privacy.mechanism: {method.title} cannot use {kind}: {reason}; it can use: {', '.join(method.mechanisms)}"
            )
        of_weights = kind == "dp-sgd" or (kind == "paper-experiment" and "dp-sgd" in method.mechanisms)
        if of_weights and self._mixes_images():
            raise ValueError(
                f"model.norm: under {kind} each image needs a gradient of its own, but BatchNorm mixes the images of a batch "
                f"and sends their statistics without noise; {'another network' if is_own(self.model.name) else 'model.norm=group'}"
            )
        if kind == "dp-sgd" and self.method.get("budget_scope", "client") != "client":
            raise ValueError(
                "method.budget_scope: dp-sgd keeps each image by a public chance that belongs to a budget of every site; "
                "method.budget_scope=client"
            )
        starts = {"release": ("noise", "coloured"), "per-example": ("noise",)}.get(kind)
        if starts and self.method.get("start", starts[0]) not in starts:
            raise MethodLimit(
                f"method.start: under {kind} surrogates may not start from the images; method.start={' or '.join(starts)}"
            )
        if kind == "release" and self.method.get("start") == "coloured" and self.method["num_steps"]:
            raise ValueError(
                "method.num_steps: released moments of pictures hold no features to descend to; method.num_steps=0"
            )
        if self.privacy.pool and self.method.get("start") != "coloured":
            raise MethodLimit("privacy.pool: sums are pooled for method.start=coloured only; privacy.pool=null")
        keeps_pictures = method.can_forget() and not method.additive
        if self.privacy.centre == "released" and not keeps_pictures:
            raise MethodLimit(f"privacy.centre: {method.title} keeps nothing from earlier rounds; privacy.centre=none")
        if kind == "per-example" and not self.method["num_steps"]:
            raise ValueError("method.num_steps: per-example needs at least one step")
        if kind in ("per-example", "paper-experiment") and self.method.get("step") == "polyak":
            raise ValueError(
                f"method.step: under {kind} the length of a step must not depend on the loss, which is private; method.step=fixed"
            )
        if kind == "paper-experiment" and self.method.get("clip", 5) is None:
            raise ValueError("method.clip: the paper's experiment clips each class's gradient; method.clip=5")
        return self

    def _mixes_images(self) -> bool:
        """Whether the network has BatchNorm; an own network is looked at."""
        if is_own(self.model.name):
            return own_model(self.model.name).taken_apart(self.data.image_size or 32).has_batch_norm
        return self.model.norm == "batch" and self.model.name not in ("vit-small", "vit-mini", "mlp")

    @model_validator(mode="after")
    def _sums_are_secure(self) -> Recipe:
        honest, method, federation = self.privacy.honest_sites, method_class(self.method["name"]), self.federation
        if honest is None:
            return self
        if not method.sums_securely:
            able = ", ".join(n for n in method_names() if method_class(n).sums_securely) or "none of the methods here"
            raise MethodLimit(
                f"privacy.honest_sites: {method.title} sends what cannot be added up over sites; "
                f"privacy.honest_sites=null, or one of: {able}"
            )
        if self.sites is not None and self.privacy.late == "alone":
            raise ValueError(
                "privacy.late: across sites a site sends nothing outside of a secure sum; privacy.late=wait"
            )
        there = federation.num_clients - len(federation.exclude or ())
        least = threshold(federation.num_clients, federation.quorum, honest)
        if least > there:
            by_site = federation.partition == "sites"
            more = "; if the images have more sites, federation.num_clients=N federation.per_round=N" if by_site else ""
            raise ValueError(
                f"privacy.honest_sites: a sum needs {least} sites (federation.quorum={federation.quorum:g} of "
                f"federation.num_clients={federation.num_clients}, and no fewer than honest_sites={honest}), "
                f"and only {there} are there{more}"
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
            raise MethodLimit(f"model.lens: {method.title} paints pictures with three channels here; model.lens=null")
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
            raise MethodLimit(
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
    def _orders_are_possible(self) -> Recipe:
        if self.tasks.order != PER_SITE:
            return self
        method, where = method_class(self.method["name"]), "tasks.order=per-site"
        if self.sites is not None:
            what = "across sites all sites learn the classes in the order of the plan"
            raise ConfigError(
                "E572", what, where=where, fix="tasks.order=natural; orders of their own are simulated only"
            )
        if not method.own_orders:
            able = ", ".join(name for name in method_names() if method_class(name).own_orders)
            what = f"{method.title} cannot learn from sites that meet the classes in orders of their own"
            why = "it needs new classes that all sites share, or nobody has shown that it does not"
            raise MethodCannot("E570", what, where=where, why=why, fix=f"tasks.order=natural, or method=one of {able}")
        for setting, why in self._against_own_orders().items():
            what = f"{setting} needs one order of classes for all sites"
            raise ConfigError("E571", what, where=where, why=why, fix=f"tasks.order=natural, or without {setting}")
        for key, value in method.one_order_only.items():
            if self.method.get(key) == value:
                what = f"method.{key}={value} needs one order of classes for all sites"
                why, fix = (
                    "it takes the classes of a task for new and for the last ones",
                    f"without method.{key}={value}",
                )
                raise MethodCannot("E571", what, where=where, why=why, fix=f"tasks.order=natural, or {fix}")
        return self

    def _against_own_orders(self) -> dict[str, str]:
        """Settings of this recipe that contradict an order for each site, with the reason."""
        tasks, federation, attack = self.tasks, self.federation, self.federation.faults.attack
        found = {
            "tasks.scenario=domain": (tasks.scenario == "domain", "domains come in one order"),
            "tasks.plan": (tasks.plan is not None, "a plan with names says itself what comes when"),
            f"tasks.drift={tasks.drift}": (tasks.drift is not None, "a stream has no tasks that a site could reorder"),
            "federation.partition=lazy-dirichlet": (
                federation.partition == "lazy-dirichlet",
                "images that are drawn on demand are those of one task for all",
            ),
            "federation.exclude": (
                bool(federation.exclude),
                "classes are numbered as the sites meet them, also this one",
            ),
            f"federation.faults.attack={attack}": (attack != "none", "an attack confuses classes of one task"),
            f"privacy.mechanism={self.privacy.mechanism}": (
                self.privacy.mechanism != "none",
                "the mechanisms are tested with classes that come to all sites at once",
            ),
        }
        return {setting: why for setting, (is_so, why) in found.items() if is_so}

    @model_validator(mode="after")
    def _plan_fits(self) -> Recipe:
        if self.sites is None:
            return self
        if self.tasks.scenario != "class":
            raise ValueError("tasks.scenario: with images at the sites tasks bring classes, not domains")
        method = method_class(self.method["name"])
        if method.additive and self.privacy.mechanism == "none":
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
        """``data``; a run by domain or with the data's sites has said what the first folders are."""
        by_domain, by_site = self.tasks.scenario == "domain", self.federation.partition == "sites"
        if self.data.layout != "auto" or not (by_domain or by_site):
            return self.data
        layout = ("sites-domains" if by_domain else "sites") if by_site else "domains"
        return self.data.model_copy(update={"layout": layout})

    def with_sites(self, num_sites: int) -> Recipe:
        """The recipe for so many sites. All of them take part in a round, if all did before; else as many as before."""
        federation = self.federation
        everybody = federation.per_round == federation.num_clients
        per_round = num_sites if everybody else min(federation.per_round, num_sites)
        changed = federation.model_dump(mode="json") | {"num_clients": num_sites, "per_round": per_round}
        return Recipe.model_validate(self.model_dump(mode="json") | {"federation": changed})

    def rounds_of(self, task: int) -> int:
        """Rounds of this task: those of the plan across sites, else ``federation.num_rounds``."""
        return self.federation.num_rounds if self.sites is None else self.sites.tasks[task].rounds

    def without(self, client: int) -> Recipe:
        """The recipe in which this site is never asked."""
        gone = sorted({*(self.federation.exclude or ()), client})
        federation = self.federation.model_dump(mode="json") | {"exclude": gone}
        return Recipe.model_validate(self.model_dump(mode="json") | {"federation": federation})

    def summed_again(self, client: int) -> Recipe:
        """The recipe without this site, whose secure sums are taken anew: those with the site stay released, and are counted."""
        recipe = self.without(client)
        privacy = recipe.privacy.model_copy(update={"earlier_sums": (self.privacy.earlier_sums or 0) + 1})
        return recipe.model_copy(update={"privacy": privacy})

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
        if self.privacy.mechanism == "release" and (method.additive or self.method.get("start") == "coloured"):
            rounds = 1  # what is released does not depend on the model: once per task
        used_in = num_tasks if method.reuses_records else 1
        promise = promise_of(self.privacy, rounds, steps, clip, used_in)
        honest, federation = self.privacy.honest_sites, self.federation
        if promise is None or honest is None:
            return promise
        least = threshold(federation.num_clients, federation.quorum, honest)
        return replace(promise, colluders=most_colluders(federation.num_clients, least, honest))

    @property
    def formal(self) -> bool:
        """Whether the run promises an epsilon."""
        promise = self.promise(1)
        return promise is not None and promise.mechanism.formal

    def full_at(self, before: int, after: int) -> str | None:
        """Why a run whose noise was computed for ``before`` tasks cannot have ``after``; None if it can.

        Where records are replayed, an epsilon for the whole run fixes the noise of the first task by the number of tasks.
        """
        noise = {promise.mechanism.sigma for tasks in (before, after) if (promise := self.promise(tasks))}
        if len(noise) <= 1:
            return None
        return f"the method trains on images of earlier tasks again, and they would exceed epsilon = {self.privacy.epsilon:g}"

    def build_method(self) -> Method:
        """The method with its hyperparameters and training settings."""
        given = {key: v for key, v in self.method.items() if key != "name"}
        return method_class(self.method["name"])(**given, train=self.train)
