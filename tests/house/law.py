"""The laws of the house as data: which room may import which, and every named exception with its reason."""

from __future__ import annotations

# A room may import itself and the rooms of earlier lines, never a neighbour on its own line, unless NEIGHBOURS says so.
ORDER = (
    ("errors", "units"),
    ("journal", "launch"),
    ("graph",),
    ("layout", "cost"),
    ("schedule",),
    ("planner",),
    ("collective",),
    ("report",),
    ("run",),
    ("checkpoint",),
    ("cli",),
    ("__main__",),
)

NEIGHBOURS = {
    ("units", "errors"): "a quantity that cannot be read is refused like everything else",
    ("launch", "journal"): "the launcher writes how a run began and ended",
}

# Values in, values out: no processes, no device, every dataclass frozen, and torch only where it is named below.
THINKING = ("errors", "units", "journal", "graph", "cost", "layout", "schedule", "planner")

# Rooms that do not know who started the process.
WITHOUT_LAUNCH = ("graph", "cost", "layout", "schedule", "planner")

# Rooms whose objects may change; dataclasses everywhere else are frozen.
MUTATING = ("collective", "run")

TORCH_WHILE_THINKING = {
    "graph/record.py": "runs the model once to see its calls",
    "graph/chance.py": "seeds torch's generators, for the recorder and for the stages",
    "graph/rows.py": "tries on small tensors in which order a call puts the samples",
    "graph/walk.py": "follows the torch calls of a run, for the recorder and for the stages",
    "graph/pause.py": "takes a walk off torch's stack of modes and puts it back",
    "graph/flops.py": "counts FLOPs where torch dispatches, by torch's own formulas",
    "graph/weights.py": "lists a model's parameters and buffers",
    "graph/keras.py": "finds the layers and the weights of a Keras model, which is a torch module",
    "graph/twin.py": "gives a model on meta values, where its program reads some",
    "graph/recorder.py": "sees the calls of that run",
    "graph/ledger.py": "tells the tensors of that run apart",
    "graph/interception.py": "replaces the functions of torch through which a run can be followed",
    "graph/absent.py": "answers on meta what shape a call gives, for the recorder and for the stages",
    "cost/measure.py": "times the calls on this device",
}

TORCH_DISTRIBUTED = ("collective", "checkpoint", "launch")

ENVIRONMENT = ("launch",)

VAGUE_NAMES = ("utils", "util", "helpers", "helper", "common", "misc")

# "Near 350": a line or two more is no reason to tear a file apart.
MAX_FILE_LINES = 360
LONG_FILES: dict[str, str] = {}

MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}

# Rooms and files that may import the face itself, and why.
FACE: dict[str, str] = {
    "launch/limit.py": "warms up everything that a script may ask for, before the memory limit begins",
    "report/doctor.py": "says which version it is",
}

# "file: name" of each private name of another package that no public one replaces; "name" where any file may use it.
PRIVATE_NAMES: dict[str, str] = {
    "_pytree": "torch's nested values have no public module in 2.13; torch.export and checkpoints take this one",
    "_python_dispatch": "TorchDispatchMode, which torch documents, has no other home",
    "collective/world.py: _world": "how many groups a process has, which torch makes the names of groups from",
    "graph/interception.py: _engine_run_backward": "what each backward ends in, by whatever name it is called",
    "graph/interception.py: _get_total_norm": "the norm that clip_grad_norm_ takes, by whatever name it is called",
    "graph/where.py: _getframe": "the user's line of each call; inspect.stack reads every file on the way",
    "graph/record.py: _buffers": "puts back buffers that a recording replaced, in their order",
    "run/stage.py: _buffers": "puts back buffers that belong to another stage, where modules override __setattr__",
    "graph/recorder.py: _C": "no public function tells whether a transform of torch.func is under way",
    "graph/recorder.py: _functorch": "the module of that function",
    "graph/interception.py: _functorch": "where torch.func's transforms look up what they run",
    "graph/interception.py: _SingleLevelFunction": "what Function.apply ends in, by whatever name it is called",
    "graph/interception.py: _jvp_with_argnums": "what torch.func's jvp and jacfwd run",
    "graph/interception.py: _vjp_with_argnums": "what its vjp and jacrev run",
    "graph/interception.py: _dynamo": "asks whether anything is compiled, without importing it",
    "graph/interception.py: _call_impl": "a module's call without torch.compile",
    "graph/ledger.py: _version": "counts the in-place changes of a tensor",
    "collective/bucket.py: _C": "counts a storage's users; without it a copy is made, as a comment there says",
    "collective/bucket.py: _cdata": "the argument of that count",
    "run/hooks.py: _functions": "the aliases that torch makes for full backward hooks, made without the hooks",
    "run/apart.py: _C": "no public function tells which backward runs, or who handles what is saved or the tensors",
    "run/apart.py: _autograd": "the module of one of those functions",
    "run/apart.py: _functorch": "the module of another",
    "run/apart.py: _current_graph_task_id": "the function that tells which backward runs",
    "run/apart.py: _top_saved_tensors_default_hooks": "the function that tells who handles what is saved",
    "run/apart.py: _backward_hooks": "a weight with hooks of the user's is not split; no public name lists them",
    "run/apart.py: _post_accumulate_grad_hooks": "hooks of the other kind",
    "run/alive.py: _getframe": "looks at what the program holds; inspect.stack reads every file on the way",
    "run/hold.py: _parameters": "swaps a parameter where modules override __setattr__",
    "graph/weights.py: _value": "the parameter of a Keras variable; `value` may be a copy of it in lower precision",
    "run/hold.py: _value": "swaps a parameter in the Keras variable that layers find it by",
    "graph/keras.py: _flatten_layers": "`layers` leaves out those of composite layers",
    "run/structure.py: _modules": "looks at all children at each step; named_children takes ten times as long",
    "run/structure.py: _parameters": "the same for parameters",
    "run/parallel.py: _buffers": "swaps a buffer where modules override __setattr__",
    "graph/flops.py: _cudnn_rnn": "an operator of torch, which is how it is named in its table",
    "graph/flops.py: _scaled_dot_product_flash_attention_for_cpu": "on meta the public call takes another kernel",
}

# "file: name" of each module-level value that changes.
MODULE_STATE: dict[str, str] = {}

# "file: class" of each dataclass that is not frozen, outside the rooms that may change things.
MUTABLE_DATACLASSES: dict[str, str] = {
    "graph/recorder.py: _OpenModule": "filled while the program runs; becomes a frozen ModuleCall",
}
