"""Costs of the methods whose clients train the model and keep real images: GLFC, FedCBDR, Re-Fed."""

from __future__ import annotations

from collections.abc import Mapping

from rescene.engine.forecast.averaging import FedAvg
from rescene.engine.forecast.world import DOUBLE, FLOAT, LABEL, PIXELS, TRAINING, Exchange, Moment, World, epoch_images
from rescene.record import num_bytes
from rescene.steps.reconstruction import INVERSION_PASSES, encoder_flops, encoder_weights


class Glfc(FedAvg):
    """Exemplars and an old model on the clients; at the first contact with a task, prototypes for the proxy."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.unsure["server_flops"] = "at most: a search for an image stops where it converges, and may be thrown away"
        if self.settings.trigger == "entropy":
            self.unsure["client_flops"] = "about: a site that notices no new task sends no prototypes"
        self.exemplars = [dict.fromkeys(world.clients, 0)]  # by task
        self.old_model = 0  # rows of its head
        self.known: dict[int, int] = {}  # last task that each client has met
        self.monitor, self.monitored = 0, -1  # images, and the task they are of

    def begin(self, moment: Moment) -> None:
        if self.monitored >= 0:  # somebody has sent prototypes, so there is a best model
            self.old_model = self.world.seen(self.monitored)
            self.tell_everybody(moment, self.world.model_bytes(self.old_model))

    def trained_on(self, task: int, client: int) -> int:
        return self.world.images(task, client) + sum(kept[client] for kept in self.exemplars[: task + 1])

    def extra_flops(self, task: int, client: int) -> int:
        world, train = self.world, self.world.train
        seen = train.local_epochs * epoch_images(self.trained_on(task, client), train.batch_size)
        flops = seen * (world.flops(self.old_model) if self.old_model else 0)
        if self.settings.trigger == "entropy":  # looks at its images in every round
            flops += world.images(task, client) * world.flops(world.seen(task))
        return flops + (self._prototype_flops(task, client) if self.known.get(client) != task else 0)

    def _candidates(self, task: int, client: int) -> tuple[int, int]:
        """(images among which prototypes are chosen, prototypes)."""
        if self.settings.prototype_classes == "current":
            return self.world.images(task, client), len(self.world.held(task, client))
        if task == 0:
            return 0, 0
        return self.exemplars[task][client], len(self.world.held(task - 1, client))

    def _prototype_flops(self, task: int, client: int) -> int:
        world = self.world
        images, prototypes = self._candidates(task, client)
        own = images + prototypes * int(self.settings.num_perturbations) * PIXELS
        side = world.experiment.arch.image_size
        return own * world.flops(world.seen(task)) + prototypes * TRAINING * encoder_flops(world.seen(task), side, side)

    def round(self, moment: Moment, participants: list[int]) -> None:
        super().round(moment, participants)
        t, world, s = moment.task, self.world, self.settings
        exchange, arrived = moment.exchanges[-1], 0
        side = world.experiment.arch.image_size
        for k in participants:
            if self.known.get(k) != t and self.trained_on(t, k):
                prototypes = self._candidates(t, k)[1]
                exchange.up[k] += prototypes * self._gradient_bytes(t)
                arrived += prototypes
            self.known[k] = t
        arrived = round(arrived * world.stands_for)
        forward = world.flops(world.seen(t))
        if arrived:
            evaluations = s.num_inversions * s.inversion_steps + 1
            moment.server_flops += arrived * evaluations * INVERSION_PASSES * encoder_flops(world.seen(t), side, side)
            pictures = arrived * min(s.num_iterates, s.num_inversions)
            if self.monitored == t:  # the set has grown: the best model is measured again
                self.monitor += pictures
                moment.server_flops += self.monitor * forward
            else:
                self.monitor, self.monitored = pictures, t
        moment.server_flops += self.monitor * forward

    def _gradient_bytes(self, task: int) -> int:
        side = self.world.experiment.arch.image_size
        return num_bytes(encoder_weights(0, self.world.seen(task), side, side))

    def end(self, moment: Moment) -> None:
        t, world = moment.task, self.world
        looked = {k: world.images(t, k) * world.flops(world.seen(t)) for k in world.clients}
        self.tell_everybody(moment, world.model_bytes(world.seen(t)), looked)
        limit = self.settings.num_exemplars
        self.exemplars.append({k: sum(min(limit, n) for n in world.held(t, k).values()) for k in world.clients})

    def remembered(self) -> Mapping[int, int]:
        each = self.world.image_values + 2 * LABEL  # a picture, its label, its task
        old = self.world.model_bytes(self.old_model) if self.old_model else 0
        return {k: old + each * sum(kept[k] for kept in self.exemplars) for k in self.world.clients}


class FedCbdr(FedAvg):
    """Exemplars by leverage: one forward pass over everybody's images at the end of a task, and two more exchanges."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.kept = dict.fromkeys(world.clients, 0)
        if self.settings.budget_scope == "global":
            self.unsure["client_flops"] = "about: chance decides which site keeps an exemplar"
        if self.settings.form == "svd":
            self.unsure["downlink_bytes"] = "at most: singular vectors have as many columns as the features have rank"

    def trained_on(self, task: int, client: int) -> int:
        return self.world.images(task, client) + self.kept[client]

    def end(self, moment: Moment) -> None:
        t, world, s = moment.task, self.world, self.settings
        sizes = {k: world.images(t, k) for k in world.clients}
        width = world.feature_size
        looked = {k: n * world.flops(world.seen(t)) for k, n in sizes.items()}
        gram = width * width * DOUBLE
        sent = {k: gram if s.form == "gram" else n * width * DOUBLE for k, n in sizes.items()}
        moment.exchanges.append(Exchange(looked, sent, world.model_bytes(world.seen(t))))
        is_global = s.budget_scope == "global"
        scores = {k: n * (2 * DOUBLE + LABEL) if is_global else 0 for k, n in sizes.items()}
        if s.form == "gram":
            moment.exchanges.append(Exchange(dict.fromkeys(sizes, 0), scores, gram))
        else:
            rank = min(sum(sizes.values()), width)
            moment.exchanges += [Exchange({k: 0}, {k: scores[k]}, n * rank * DOUBLE) for k, n in sizes.items()]
        if is_global:
            self.tell_everybody(moment, 3 * world.seen(t) * DOUBLE)  # threshold, candidates and mass of every class
        for k in world.clients:
            self.kept[k] += round(sum(self._share(t, label, n) for label, n in world.held(t, k).items()))

    def _share(self, task: int, label: int, num_images: int) -> float:
        """Exemplars of a class on a client that holds this many of it."""
        budget: int = self.settings.budget
        if self.settings.budget_scope == "client":
            return min(budget, num_images)
        everywhere = sum(self.world.held(task, k).get(label, 0) for k in self.world.clients)
        return min(budget, everywhere) * num_images / everywhere

    def remembered(self) -> Mapping[int, int]:
        each = self.world.image_values + LABEL + FLOAT  # a picture, its label, its weight
        return {k: each * n for k, n in self.kept.items()}


class ReFed(FedAvg):
    """A cache beside the current images; where both do not fit, a personalised model scores the previous ones."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.cache = dict.fromkeys(world.clients, 0)

    def begin(self, moment: Moment) -> None:
        if moment.task == 0:
            return
        world, s = self.world, self.settings
        forward = world.flops(world.seen(moment.task - 1))  # before the head grows
        looks = 1 if s.importance == "last-layer" else TRAINING
        flops = {}
        for k, pool in self.cache.items():
            room = max(0, s.storage - world.images(moment.task, k))
            if pool > room > 0:
                flops[k] = s.pim_epochs * (TRAINING * epoch_images(pool, s.pim_batch_size) + looks * pool) * forward
            self.cache[k] = min(pool, room)
        self.tell_everybody(moment, world.model_bytes(world.seen(moment.task - 1)), flops)

    def trained_on(self, task: int, client: int) -> int:
        return self.world.images(task, client) + self.cache[client]

    def end(self, moment: Moment) -> None:
        self.tell_everybody(moment, 0)
        for k in self.cache:
            self.cache[k] += self.world.images(moment.task, k)

    def remembered(self) -> Mapping[int, int]:
        return {k: n * (self.world.image_values + LABEL) for k, n in self.cache.items()}
