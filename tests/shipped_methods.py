"""The methods of the package; other tests register methods of their own."""

from rescene.methods import method_class, method_names

SHIPPED = [name for name in method_names() if method_class(name).__module__.startswith("rescene.methods.")]
