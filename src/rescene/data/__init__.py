"""Images, tasks, partitions and shards; readers for the paper's data sets and for your own."""

from rescene.data.catalog import available
from rescene.data.checks import content_rows, inspect, load_readable, propose_tasks, verify
from rescene.data.images import Dataset, Images, Transform
from rescene.data.lazy import LazySplit
from rescene.data.loading import load, prepare
from rescene.data.partition import dirichlet_partition, iid_partition, partition
from rescene.data.shard import Shard
from rescene.data.stand_in import has_stand_in, stand_in
from rescene.data.tasks import Task, plan_tasks

__all__ = [
    "Dataset",
    "Images",
    "LazySplit",
    "Shard",
    "Task",
    "Transform",
    "available",
    "content_rows",
    "dirichlet_partition",
    "has_stand_in",
    "iid_partition",
    "inspect",
    "load",
    "load_readable",
    "partition",
    "plan_tasks",
    "prepare",
    "propose_tasks",
    "stand_in",
    "verify",
]
