"""ColossalAI's policies (shardformer): they replace modules of a Transformers model object by other modules.

    class Mine(Policy):
        def module_policy(self):
            norm = SubModuleReplacementDescription(suffix="input_layernorm", target_module=MyNorm)
            return {LlamaDecoderLayer: ModulePolicyDescription(sub_module_replacement=[norm])}

    InferenceEngine(model, tokenizer, config, model_policy=Mine())

A target module has `from_native_module(module, process_group=None, **kwargs)`, which returns what takes the module's
place. The engine builds the class again without values and applies the policy there, too; it then computes the modules
that the policy leaves, in which every nn.Linear, the embedding, the head and the attention are the engine's.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock import InvalidRequestError
from penstock.errors import fail, invalid


@dataclass(frozen=True, slots=True)
class SubModuleReplacementDescription:
    """Replaces the module at a dotted path below the matched one.

    Attributes:
        suffix: the path.
        target_module: the class whose `from_native_module` makes the new module.
        kwargs: further arguments of from_native_module.
        ignore_if_not_exist: whether a matched module may lack the path.
    """

    suffix: str
    target_module: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ignore_if_not_exist: bool = False


@dataclass(frozen=True, slots=True)
class ModulePolicyDescription:
    """What is replaced in each module of one class.

    Attributes:
        attribute_replacement: dotted path of an attribute -> its new value.
        param_replacement: functions that change the parameters of a module in place.
        sub_module_replacement: the modules below it that are replaced.
        method_replacement: name of a method -> the function that takes its place.
    """

    attribute_replacement: Mapping[str, Any] | None = None
    param_replacement: Sequence[Callable[[Any], None]] | None = None
    sub_module_replacement: Sequence[SubModuleReplacementDescription] | None = None
    method_replacement: Mapping[str, Callable[..., Any]] | None = None


class Policy:
    """The base class of policies.

    Attributes:
        model: the model object that is changed; it may be on the meta device.
    """

    model: Any = None

    def set_model(self, model: Any) -> None:
        """Store the model that the other methods may look at."""
        self.model = model

    def config_sanity_check(self) -> None:
        """Raise an error if the policy does not fit the model's config."""

    def preprocess(self) -> Any:
        """Change the model before its modules are replaced, and return it."""
        return self.model

    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        """Say what is replaced, by the class of a module or the name of the class."""
        raise NotImplementedError

    def postprocess(self) -> Any:
        """Change the model after its modules have been replaced, and return it."""
        return self.model


def apply_policy(model: Any, policy: Policy) -> None:
    """Replace modules of a model object in place.

    Raises:
        InvalidRequestError: a description matches no module, or names a module that does not exist; or the policy
            returns another model.
    """
    policy.set_model(model)
    policy.config_sanity_check()
    _check_in_place(model, policy.preprocess(), "preprocess")
    for kind, description in policy.module_policy().items():
        found = [module for module in model.modules() if kind in (type(module), type(module).__qualname__)]
        if not found:
            name = kind if isinstance(kind, str) else kind.__qualname__
            raise _refused(f"{name} is the class of no module of {type(model).__name__}")
        for module in found:
            _change(module, description)
    _check_in_place(model, policy.postprocess(), "postprocess")


def with_policy(model: Any, policy: Any) -> Any:
    """Apply a policy to a model object in place, and return it as one of a class whose objects all have the policy.

    Raises:
        InvalidRequestError: the policy is not a Policy, or does not fit the model.
    """
    if isinstance(policy, type):
        policy = policy()
    if not isinstance(policy, Policy):
        raise fail("model_policy", policy, "a Policy (penstock_lab.compat.colossalai_policy)")
    own = type(model)
    if not callable(getattr(model, "named_modules", None)):
        raise _refused(f"modules of {own.__name__} cannot be replaced; give a model object of Transformers")

    def build(self: Any, config: Any) -> None:
        own.__init__(self, config)
        apply_policy(self, policy)

    apply_policy(model, policy)
    model.__class__ = type(f"{own.__name__}With{type(policy).__name__}", (own,), {"__init__": build})
    return model


def _change(module: Any, description: ModulePolicyDescription) -> None:
    for path, value in (description.attribute_replacement or {}).items():
        parent, _, name = path.rpartition(".")
        setattr(_below(module, parent, path), name, value)
    for change in description.param_replacement or ():
        change(module)
    for name, function in (description.method_replacement or {}).items():
        setattr(module, name, types.MethodType(function, module))
    for item in description.sub_module_replacement or ():
        parent, _, name = item.suffix.rpartition(".")
        owner = _below(module, parent, item.suffix, optional=item.ignore_if_not_exist)
        native = getattr(owner, name, None)
        if native is not None:
            setattr(owner, name, item.target_module.from_native_module(native, process_group=None, **item.kwargs))
        elif not item.ignore_if_not_exist:
            raise _refused(f"{type(module).__name__} has no {item.suffix}")


def _below(module: Any, path: str, whole: str, *, optional: bool = False) -> Any:
    found = module
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    if found is None and not optional:
        raise _refused(f"{type(module).__name__} has no {whole}")
    return found


def _check_in_place(model: Any, returned: Any, method: str) -> None:
    if returned is not model:
        raise _refused(f"{method} must change the model in place and return it")


def _refused(why: str) -> InvalidRequestError:
    return invalid("model_policy", why)
