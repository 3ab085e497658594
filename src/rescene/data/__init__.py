"""Images, tasks, partitions and shards; readers for the paper's data sets and for your own."""

from rescene.data.catalog import available, has_stand_in, stand_in
from rescene.data.images import Batch, Dataset, Images, Shard, Task, Transform
from rescene.data.inspection import content_rows, inspect, load_readable, propose_tasks, verify
from rescene.data.loading import load, prepare
from rescene.data.objects import dataset_of, own_datasets, register_dataset
from rescene.data.partition import LazySplit, by_site, dirichlet_partition, iid_partition, partition, site_names
from rescene.data.tasks import SiteOrders, plan_tasks

__all__ = [
    "Batch",
    "Dataset",
    "Images",
    "LazySplit",
    "Shard",
    "SiteOrders",
    "Task",
    "Transform",
    "available",
    "by_site",
    "content_rows",
    "dataset_of",
    "dirichlet_partition",
    "has_stand_in",
    "iid_partition",
    "inspect",
    "load",
    "load_readable",
    "own_datasets",
    "partition",
    "plan_tasks",
    "prepare",
    "propose_tasks",
    "register_dataset",
    "site_names",
    "stand_in",
    "verify",
]
