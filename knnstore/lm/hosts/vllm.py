"""A store inside vLLM: a plugin that mixes the store into every logit that vLLM computes.

vLLM calls `register_vllm_plugin` in each of its processes (entry point ``knnstore`` in
``vllm.general_plugins``). It does nothing unless the environment variable ``KNNSTORE_HOME`` names a store::

    KNNSTORE_HOME=HOME vllm serve MODEL

This is the only module that uses names of vLLM. It replaces methods of vLLM in four places:

1. `EngineArgs.create_engine_config`: before the engine starts, checks that the store fits the model.
2. `InputProcessor`: the front end checks the ``knn_*`` options of each request (HTTP 400).
3. `load_model` of the model runners (the classes that run the model in vLLM's workers): when the model is
   loaded, its method `compute_logits` is replaced. All logits come from this method: those of next tokens, of
   drafts, and of the prompt. So penalties, grammars, sampling, log-probabilities, echo and the verification
   of drafts all use the mixture.
4. `Scheduler.update_from_output`: ends requests whose retrieval failed, with the finish reason ``error``; and
   `OutputProcessor.process_outputs` in the front end counts these requests.

vLLM changes these names between releases. Another release than `VERSIONS`, or a missing name, is an error at
the start, because vLLM would otherwise serve the model without the store and without notice.
"""

import functools
import importlib
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoTokenizer

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.lm.drafts import Drafts
from knnstore.lm.hosts.request_options import FELL_BACK, RequestOptions
from knnstore.lm.hosts.step_mixer import HostedSettings, Step, StepMixer, needs_all_states
from knnstore.lm.keys import Joining
from knnstore.lm.reading import check_checkpoint, check_tokenizer, prefix_of
from knnstore.lm.settings import KNNSettings, Purpose
from knnstore.store import KNNStore

HOME = "KNNSTORE_HOME"
"""Environment variable: the folder of the store. `vllm_entry` does nothing without it."""

ON_ERROR = "KNNSTORE_ON_ERROR"
"""Environment variable: ``fail`` (default) ends a request whose retrieval fails; ``fallback`` continues this
request with the model alone."""

DRAFTS_HOME = "KNNSTORE_DRAFTS_HOME"
"""Environment variable: the folder of the store for `StoreDrafts`; default is the folder in
``KNNSTORE_HOME``."""

VERSIONS = SpecifierSet(">=0.32,<0.33")
"""Releases of vLLM with which the plugin was tested."""

NAMES = {
    "vllm.engine.arg_utils": ("EngineArgs.create_engine_config",),
    "vllm.v1.engine.input_processor": ("InputProcessor._build_logits_processors_params_validator",),
    "vllm.exceptions": ("VLLMValidationError",),
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner.load_model",
        "GPUModelRunner._prepare_inputs",
        "GPUModelRunner._model_forward",
        "GPUModelRunner.sample_tokens",
    ),
    "vllm.v1.worker.cpu_model_runner": ("CPUModelRunner.load_model",),
    "vllm.v1.worker.gpu.model_runner": ("GPUModelRunner.load_model", "GPUModelRunner.sample"),
    "vllm.v1.core.sched.scheduler": ("Scheduler.update_from_output", "Scheduler.finish_requests"),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs", "FinishReason.ERROR"),
    "vllm.v1.engine.output_processor": ("OutputProcessor.process_outputs",),
    "vllm.v1.request": ("RequestStatus.FINISHED_ERROR",),
    "vllm.distributed": ("get_tp_group", "get_pp_group"),
    "vllm.platforms": ("current_platform.use_all_gather",),
}
"""All names of vLLM that the plugin uses, by module. `check_vllm` checks that they exist."""

_RUNNERS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)
"""Modules and names of vLLM's model runners, the classes that run the model in vLLM's workers."""
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
"""The module of vLLM's Model Runner V2. The other runners are variants of Model Runner V1."""

_IDENTIFYING, _MOST_PENDING = 16, 4096
"""`_IDENTIFYING` is the number of tokens at the end of a text by which the text is recognized in the next
step, `_MOST_PENDING` the largest number of texts that are remembered."""

Numbers = NDArray[np.int64]
"""Array of integers."""

_logger = logging.getLogger(__name__)
_is_attached = False


def attach() -> None:
    """Replace methods of vLLM's classes in this process, so that the store is mixed into all predictions.

    A second call does nothing. If vLLM has another version or lacks a name, nothing is mixed, and the next
    creation of a vLLM engine raises the error.
    """
    global _is_attached
    if _is_attached:
        return
    _is_attached = True
    try:
        check_vllm()
    except ConfigError as error:
        # vLLM logs the exceptions of plugins and starts without them, so the error is raised later.
        _refuse_to_start(error)
        return
    _replace_method("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", _wrap_create_engine_config)
    _replace_method(
        "vllm.v1.engine.input_processor",
        "InputProcessor",
        "_build_logits_processors_params_validator",
        _wrap_build_validator,
    )
    _replace_method(
        "vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output", _wrap_update_from_output
    )
    _replace_method(
        "vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs", _wrap_process_outputs
    )
    for module, name in _RUNNERS:
        if "load_model" in vars(getattr(importlib.import_module(module), name)):
            _replace_method(module, name, "load_model", _wrap_load_model)


def check_vllm() -> None:
    """Check that vLLM has a tested version and all the names that the plugin uses.

    Raises:
        ConfigError: vLLM has another version, or lacks one of the names.
    """
    import vllm

    if not VERSIONS.contains(Version(vllm.__version__).base_version):
        raise ConfigError(
            f"knnstore was tested with vllm {VERSIONS}, this is {vllm.__version__}: install one of these, or "
            f"unset {HOME}"
        )
    for module, paths in NAMES.items():
        for path in paths:
            try:
                found: Any = importlib.import_module(module)
                for part in path.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                raise ConfigError(
                    f"vllm {vllm.__version__} has no {module}.{path}, which knnstore needs: install vllm "
                    f"{VERSIONS}, or unset {HOME}"
                ) from None


def _replace_method(module: str, owner: str, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a method of a class by a wrapper of this method.

    Args:
        module: name of the module of the class.
        owner: name of the class.
        name: name of the method.
        wrapper: function that takes the old method and returns the new one.
    """
    cls = getattr(importlib.import_module(module), owner)
    setattr(cls, name, wrapper(getattr(cls, name)))


# 1. Before the engine starts.


def _refuse_to_start(error: KnnstoreError) -> None:
    """Replace vLLM's creation of an engine's configuration, so that it raises an error."""

    def replace_by_error(_: Any) -> Any:
        """Return a function that raises the error, in place of any method."""

        def create_engine_config(*_: Any, **__: Any) -> Any:
            """Raise the error, or exit in the commands of vLLM's server."""
            _raise_or_exit(error)

        return create_engine_config

    _replace_method("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", replace_by_error)


def _raise_or_exit(error: KnnstoreError) -> None:
    """Raise an error. In the commands of vLLM's server, print its message instead and exit with status 1."""
    if os.path.basename(sys.argv[0]) in ("vllm", "api_server.py"):
        sys.exit(f"knnstore: {error}")
    raise error


def _wrap_create_engine_config(create_engine_config: Any) -> Any:
    """Return a wrapper of `EngineArgs.create_engine_config` that also checks that the store fits.

    If the store does not fit the model, the wrapper raises an error, so that vLLM does not start.

    Args:
        create_engine_config: vLLM's method, which returns the configuration.
    """

    @functools.wraps(create_engine_config)
    def create_checked_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's configuration. Raises an error if the store does not fit it."""
        config = create_engine_config(self, *args, **kwargs)
        try:
            check_config(config)
        except KnnstoreError as error:
            _raise_or_exit(error)
        return config

    return create_checked_config


def check_config(config: Any) -> None:
    """Check that the store in ``KNNSTORE_HOME`` fits a configuration of vLLM.

    Args:
        config: vLLM's configuration (`VllmConfig`).

    Raises:
        StoreNotFoundError: the folder has no store.
        FingerprintMismatchError: the store was made with another model or tokenizer.
        ConfigError: the model is a pooling model; LoRA, prompt embeddings or batch-sharded sampling is
            requested; the model's files cannot be read; or ``KNNSTORE_ON_ERROR`` has an unknown value.
    """
    _read_error_policy()
    model = config.model_config
    if model.runner_type == "pooling":
        raise ConfigError(f"a store needs a model that generates text: unset {HOME} for a pooling model")
    if config.lora_config is not None:
        raise ConfigError(
            "LoRA adapters (--enable-lora) change the hidden states, which then do not match the "
            "store's keys: leave them out"
        )
    if model.enable_prompt_embeds:
        raise ConfigError("a store needs the tokens of each prompt: leave --enable-prompt-embeds out")
    if getattr(config.parallel_config, "enable_batch_sharded_sampling", False):
        raise ConfigError("a store needs whole batches in each process: leave batch-sharded sampling out")
    with KNNStore.open(os.environ[HOME]) as store:
        check_checkpoint(store.identity, model.model, model.tokenizer, revision=model.revision)


def _read_error_policy() -> str:
    """Return what happens to a request whose retrieval fails: ``fail`` (it ends) or ``fallback``.

    With ``fallback`` the model continues the request alone. The environment variable `ON_ERROR` has the
    value; the default is ``fail``.

    Raises:
        ConfigError: the environment variable has another value.
    """
    value = os.environ.get(ON_ERROR) or "fail"
    if value not in ("fail", "fallback"):
        raise ConfigError(f"{ON_ERROR} is fail or fallback, got {value!r}")
    return value


# 2. In the front end: the options of each request.


def _wrap_build_validator(build_validator: Any) -> Any:
    """Return a wrapper of `InputProcessor._build_logits_processors_params_validator`.

    The validators that the wrapper returns also check the ``knn_*`` options of each request.

    Args:
        build_validator: vLLM's method, which returns a function that checks the parameters of a request.
    """

    @functools.wraps(build_validator)
    def build_checking_validator(self: Any) -> Callable[[Any], None]:
        """Return vLLM's validator of a request's parameters, extended by the check of the options."""
        validate = build_validator(self)
        checker = OptionChecker()

        def validate_all_params(params: Any) -> None:
            """Check the parameters of a request as vLLM does, and then the ``knn_*`` options."""
            validate(params)
            checker.check(params)

        return validate_all_params

    return build_checking_validator


class OptionChecker:
    """Checks the ``knn_*`` options of requests in vLLM's front end. Threads may share the object.

    It opens the store at the first check.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: KNNStore | None = None
        self._settings: HostedSettings | None = None

    def check(self, params: Any) -> None:
        """Check the ``knn_*`` options in the parameters of a request.

        If the settings need hidden states of earlier tokens, the request is marked to compute its whole
        prompt, because vLLM's prefix cache has no hidden states. If the store cannot be read, nothing is
        checked: the engine then fails the request, or continues it without the store.

        Args:
            params: vLLM's `SamplingParams` of the request; changed if the request is marked.

        Raises:
            VLLMValidationError: an option is wrong, or a domain does not exist; becomes HTTP 400.
        """
        from vllm.exceptions import VLLMValidationError

        try:
            options = RequestOptions.parse(getattr(params, "extra_args", None))
            if (not options.is_off or options.store) and self._needs_all_states(options):
                params.skip_reading_prefix_cache = True
        except ConfigError as error:
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
        except Exception as error:
            params.skip_reading_prefix_cache = True
            _logger.warning("the options of a request cannot be checked, the store failed: %s", error)

    def _needs_all_states(self, options: RequestOptions) -> bool:
        """Check options against the store, and return True if they need hidden states of earlier tokens.

        Raises:
            ConfigError: the options name another store or a domain that does not exist, or ask for something
                that the store cannot do.
        """
        with self._lock:
            if self._settings is None:
                self._store = KNNStore.open(os.environ[HOME])
                self._settings = HostedSettings(self._store)
            assert self._store is not None
            if options.store not in (None, self._store.id):
                raise ConfigError(f"knn_store: this server uses the store {self._store.id}")
            if options.is_off:
                return False
            missing = self._settings.find_missing_domains(options)
            if missing:
                raise ConfigError(f"knn_domains: the store has no domain {missing[0]!r}")
            settings = self._settings.resolve(options, Purpose.SCORING)
            if self._store.is_keyless and settings.retrieves:
                raise ConfigError("knn_lambda: the store has no keys and retrieves only n-grams")
            _, joining = Joining.parse(self._store.identity.key)
            return needs_all_states(settings, joining)


# 3. In the workers: the logits.


def _wrap_load_model(load_model: Any) -> Any:
    """Return a wrapper of a model runner's `load_model` that attaches the store to the loaded model.

    Args:
        load_model: vLLM's method.
    """

    @functools.wraps(load_model)
    def load_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model, attach the store to it, and return the result of vLLM's method.

        In a pipeline of several processes only the last process computes logits, so the others get no store.
        """
        from vllm.distributed import get_pp_group

        result = load_model(self, *args, **kwargs)
        if not get_pp_group().is_last_rank:  # of a pipeline only the last stage has the head
            return result
        is_second = any(cls.__module__ == _SECOND_RUNNER for cls in type(self).__mro__)
        attachment = SecondRunnerAttachment if is_second else FirstRunnerAttachment
        self.knnstore = attachment(self)
        return result

    return load_and_attach


class StateTap:
    """Copies the hidden states that a vLLM model computes at one of its modules, in each forward pass.

    The store's keys were made of the states of this module, so a search needs the states of the new tokens.
    The constructor adds a hook to the module.

    Args:
        model: the loaded model.
        place: the module and its side, as in the identity of the store: for example
            ``model.layers.29.mlp:input`` for the input of a module, or ``…:output`` for the output of a
            module.

    Raises:
        ConfigError: the model has no such module.
    """

    def __init__(self, model: nn.Module, place: str) -> None:
        path, _, side = place.rpartition(":")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise ConfigError(
                f"the store's keys are taken at {place}, but {type(model).__name__} of vLLM has no such "
                "module: make a store with --key final_hidden"
            ) from None
        self._buffer: Tensor | None = None
        """The states of the last pass, shape (n or more, width); None before the first pass."""
        if side == "input":
            module.register_forward_pre_hook(self._keep_input, with_kwargs=True)
        else:
            module.register_forward_hook(self._keep_output)

    def states(self, count: int) -> Tensor:
        """Return the states of the first `count` tokens of the last pass, shape (count, width).

        There must have been a forward pass.
        """
        assert self._buffer is not None
        return self._buffer[:count]

    def _keep_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the states from the arguments of the module. This is the hook before the module runs."""
        self._copy_to_buffer((*args, *kwargs.values()))

    def _keep_output(self, _: nn.Module, __: Any, output: Any) -> None:
        """Copy the states from the result of the module. This is the hook after the module has run."""
        self._copy_to_buffer(output if isinstance(output, tuple) else (output,))

    def _copy_to_buffer(self, values: tuple[Any, ...]) -> None:
        """Copy the states into a buffer that stays at the same memory address.

        The fixed address lets a CUDA graph replay the copy. vLLM's normalizations take the residual as a
        second tensor and add it. If the second tensor has the shape of the first, the state is the sum of
        both tensors.

        Args:
            values: the arguments or the results of the module; the first floating-point tensor has the
                states.
        """
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        states = tensors[0]
        if len(tensors) > 1 and tensors[1].shape == states.shape:
            states = states + tensors[1]
        if self._buffer is None or len(self._buffer) < len(states):
            self._buffer = torch.empty_like(states)
        self._buffer[: len(states)].copy_(states)


class Attachment(ABC):
    """Connects a store to a model runner of vLLM: mixes the store into the logits that the runner computes.

    A model runner is the object that runs the model in a worker process of vLLM. The constructor replaces the
    model's method `compute_logits`. There is a subclass for each generation of model runners: it replaces
    methods of the runner, so that `add_request`, `begin_step`, `extend_texts`, `end_step` and
    `remove_request` are called at the right moments.

    In a group of processes that compute one model together (tensor parallelism), only the first process opens
    the store. It sends the mixed logits to the other processes, if each process samples for itself.

    Args:
        runner: the model runner, after its model was loaded.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.distributed import get_tp_group
        from vllm.platforms import current_platform

        self._runner = runner
        self._hidden: Tensor | None = None
        self._tap: StateTap | None = None
        self.mixer: StepMixer | None = None
        """Mixes the store into the logits of each step; None in a process that does not open the store."""
        # Each rank of a tensor parallel group samples for itself, so all need the same mixed logits.
        self._group = get_tp_group()
        self._is_shared = self._group.world_size > 1 and current_platform.use_all_gather()
        if self._group.rank_in_group == 0:
            self._open_store()
        self._compute_logits = runner.model.compute_logits
        runner.model.compute_logits = self.compute_logits

    def _open_store(self) -> None:
        """Open the store and create the mixer, which mixes the store's predictions into logits.

        Also adds a hook that copies hidden states to the module of the model whose states the keys are made
        of. No hook is added if the keys are made of the states that go into the head (the last layer).
        """
        runner, config = self._runner, self._runner.vllm_config
        drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        store = KNNStore.open(os.environ[HOME])
        place, _ = Joining.parse(store.identity.key)
        if not _is_head_input(runner.model, place):
            self._tap = StateTap(runner.model, place)
        model = config.model_config
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
        self.mixer = StepMixer(store, prefix_of(tokenizer), drafts)

    def add_request(self, new: Any) -> None:
        """Register a request at the mixer when it begins, or when Model Runner V2 resumes it.

        Args:
            new: vLLM's description of the request (`NewRequestData`).
        """
        if self.mixer is None:
            return
        params, prompt = new.sampling_params, new.prompt_token_ids
        self.mixer.add_request(
            new.req_id,
            params.extra_args,
            prompt,
            generated=(new.prefill_token_ids or ())[len(prompt) :],
            wants_prompt_scores=not (
                params.prompt_logprobs is None and params.prompt_logprob_token_ids is None
            ),
        )

    def extend_texts(self, hidden: Tensor, count: int) -> None:
        """Append the tokens of the current step to the texts of their requests.

        Call it after the forward pass and before the logits are computed.

        Args:
            hidden: final hidden states of the pass, the input of the head (the last layer), shape (n or more,
                h).
            count: number of tokens of the pass, n.
        """
        self._hidden = hidden
        if self.mixer is not None and not self.mixer.is_idle:
            self.mixer.extend_texts(hidden[:count] if self._tap is None else self._tap.states(count))

    def remove_request(self, name: str) -> None:
        """Forget a request that has ended, given by its id."""
        if self.mixer is not None:
            self.mixer.remove_request(name)

    def begin_step(self, names: Sequence[str], starts: Numbers, tokens: Tensor, positions: Tensor) -> None:
        """Tell the mixer the tokens that the model reads in the next forward pass.

        Args:
            names: ids of the b requests of the batch.
            starts: index of the first token of each request, and at the end the number n of tokens, shape (b
                + 1,).
            tokens: the token ids of the model's input, n or more.
            positions: the position of each token in its text, n or more.
        """
        if self.mixer is not None:
            count = int(starts[-1])
            self.mixer.begin_step(
                Step(
                    list(names),
                    starts,
                    tokens[:count].cpu().numpy().astype(np.int64),
                    positions[:count].cpu().numpy().astype(np.int64),
                )
            )

    def end_step(self, output: Any) -> Any:
        """End the step, and return the runner's output with the ids of the requests that failed in the step.

        Nothing is mixed into logits until the next step begins, because vLLM also runs the model outside of
        steps, for warm-up and profiling.

        Args:
            output: the output of the runner for the step; None if it has none.
        """
        self._hidden = None
        if self.mixer is None:
            return output
        self.mixer.begin_step(None)
        failures = self.mixer.take_failures()
        if failures and output is not None:
            _add_failures(output, failures)
        return output

    def compute_logits(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """Compute the model's logits, and mix the store into them if a step has begun.

        Replaces the model's method.

        Args:
            hidden: final hidden states of m tokens of the step, shape (m, h).
            *args: further arguments of the model's method.
            **kwargs: further arguments of the model's method.

        Returns:
            Log-probabilities of the mixture, or the model's logits, shape (m, v); None if the model's method
            returns None.
        """
        logits: Tensor | None = self._compute_logits(hidden, *args, **kwargs)
        if self._hidden is None or logits is None or not len(logits):
            return logits
        first = _find_first_row_of_view(hidden, self._hidden)
        if first is None:
            rows, purpose = self.sampled_rows()[: len(hidden)], Purpose.GENERATION
        else:
            rows, purpose = np.arange(first, first + len(hidden)), Purpose.SCORING
        if self.mixer is not None:
            logits = self.mixer.mix(logits, rows, purpose)
        if self._is_shared:
            logits = self._group.broadcast(logits.float().contiguous(), src=0)
        return logits

    @abstractmethod
    def sampled_rows(self) -> Numbers:
        """Return the indices of the m tokens after which a token is sampled, among all tokens of the step.

        The result is int64 and has the shape (m,).
        """


class FirstRunnerAttachment(Attachment):
    """Connects a store to vLLM's Model Runner V1, whose batch of requests is the attribute `input_batch`.

    Args:
        runner: the model runner, after its model was loaded.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._logits_indices: Tensor | None = None
        self._count = 0
        prepare, forward, sample = runner._prepare_inputs, runner._model_forward, runner.sample_tokens

        def _prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """Make the runner prepare the inputs of a step, and begin the step at the mixer."""
            inputs = prepare(scheduler_output, *args, **kwargs)
            self._begin_step(scheduler_output, inputs[0])
            return inputs

        def _model_forward(*args: Any, **kwargs: Any) -> Any:
            """Make the runner run the model, and append the step's tokens to the texts."""
            output = forward(*args, **kwargs)
            if self._count:
                self.extend_texts(output[0] if isinstance(output, tuple) else output, self._count)
            return output

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            """Make the runner sample tokens, and end the step, also after an error."""
            output = None
            try:
                output = sample(*args, **kwargs)
            finally:
                self._count = 0
                output = self.end_step(output)
            return output

        runner._prepare_inputs = _prepare_inputs
        runner._model_forward = _model_forward
        runner.sample_tokens = sample_tokens

    def sampled_rows(self) -> Numbers:  # noqa: D102
        assert self._logits_indices is not None
        rows: Numbers = self._logits_indices.cpu().numpy().astype(np.int64)
        return rows

    def _begin_step(self, scheduler_output: Any, logits_indices: Tensor) -> None:
        """Begin a step with the batch that the runner has prepared.

        Also adds new requests and removes ended ones.

        Args:
            scheduler_output: vLLM's plan of the step, with the new and the ended requests.
            logits_indices: indices of the tokens after which a token is sampled.
        """
        runner = self._runner
        batch = runner.input_batch
        # 1) Requests that began or ended.
        for name in scheduler_output.finished_req_ids:
            self.remove_request(name)
        for new in scheduler_output.scheduled_new_reqs:
            self.add_request(new)
        # 2) The tokens that the model receives. With asynchronous scheduling the runner's lists of generated
        # tokens are late, so the ids are read from the model's input.
        names = list(batch.req_ids)
        starts = runner.query_start_loc.np[: len(names) + 1].astype(np.int64)
        self._count = int(starts[-1])
        self._logits_indices = logits_indices
        self.begin_step(names, starts, runner.input_ids.gpu, runner.positions)


class SecondRunnerAttachment(Attachment):
    """Connects a store to vLLM's Model Runner V2, which passes its batch of requests to the method `sample`.

    Args:
        runner: the model runner, after its model was loaded.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._batch: Any = None
        add, remove = runner.add_requests, runner.finish_requests
        sample, sample_tokens = runner.sample, runner.sample_tokens

        def add_requests(scheduler_output: Any) -> Any:
            """Register the new requests at the mixer, and let the runner add them."""
            for new in scheduler_output.scheduled_new_reqs:
                self.add_request(new)
            return add(scheduler_output)

        def finish_requests(scheduler_output: Any) -> Any:
            """Forget the requests that have ended, and let the runner remove these requests."""
            for name in scheduler_output.finished_req_ids:
                self.remove_request(name)
            return remove(scheduler_output)

        def sample_batch(hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
            """Begin a step of the mixer with the batch, and let the runner compute logits and sample tokens.

            Returns the result of the runner's method.
            """
            self._begin_step(hidden_states, input_batch)
            return sample(hidden_states, input_batch, grammar_output)

        def sample_step(*args: Any, **kwargs: Any) -> Any:
            """Make the runner sample tokens, and end the step, also after an error."""
            output = None
            try:
                output = sample_tokens(*args, **kwargs)
            finally:
                output = self.end_step(output)
            return output

        runner.add_requests, runner.finish_requests = add_requests, finish_requests
        runner.sample, runner.sample_tokens = sample_batch, sample_step

    def sampled_rows(self) -> Numbers:  # noqa: D102
        rows: Numbers = self._batch.logits_indices.cpu().numpy().astype(np.int64)
        return rows

    def _begin_step(self, hidden: Tensor, batch: Any) -> None:
        """Begin a step with the batch that the runner samples from, and append its tokens to the texts.

        Args:
            hidden: final hidden states of the pass, shape (n or more, h).
            batch: vLLM's batch of requests.
        """
        self._batch = batch
        starts = batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64)
        self.begin_step(batch.req_ids, starts, batch.input_ids, batch.positions)
        self.extend_texts(hidden, int(starts[-1]))


# Drafts, which vLLM asks for by the name of the class.


class StoreDrafts:
    """Proposes drafts from the text of a store to vLLM, for speculative decoding with any model.

    A draft is a guess of the next tokens. It repeats the tokens that followed the same last tokens in the
    store's documents, or earlier in the text itself. vLLM verifies drafts, so the generated text stays the
    same. Drafts work with and without the plugin that mixes the store into the logits. Only Model Runner V1
    has this interface. Start vLLM with::

        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                               "model": "knnstore.lm.hosts.vllm.StoreDrafts"}'

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        ConfigError: neither ``KNNSTORE_DRAFTS_HOME`` nor ``KNNSTORE_HOME`` names a store.
        FingerprintMismatchError: the store was made with another tokenizer.
    """

    def __init__(self, vllm_config: Any) -> None:
        home = os.environ.get(DRAFTS_HOME) or os.environ.get(HOME)
        if not home:
            raise ConfigError(f"drafts need a store: set {DRAFTS_HOME} or {HOME} to the folder of a store")
        self._store = KNNStore.open(home)
        model = vllm_config.model_config
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
        check_tokenizer(tokenizer, self._store.identity)
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = model.max_model_len
        self._pending: OrderedDict[tuple[int, bytes], tuple[Drafts, int]] = OrderedDict()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.integer[Any]],
        **_: Any,
    ) -> list[list[int]]:
        """Return guesses of the next tokens of each request of a batch.

        Args:
            sampled_token_ids: the tokens that each of b requests got in this step; empty for a request whose
                prompt is not complete, which gets no draft.
            num_tokens_no_spec: number of tokens of each request, without drafts, shape (b or more,).
            token_ids_cpu: tokens of each request, shape (b or more, longest).
            **_: further arguments of vLLM, not used.

        Returns:
            The draft of each of the b requests, a list of token ids; empty if there is no good guess.
        """
        proposed = list[list[int]]()
        for row, sampled in enumerate(sampled_token_ids):
            count = int(num_tokens_no_spec[row])
            if not len(sampled) or count >= self._longest:
                proposed.append([])
                continue
            text = token_ids_cpu[row, :count].astype(np.int64)
            # vLLM does not say which request a row is, so the end of its text identifies it.
            drafts, drafted = self._pending.pop(_identify_text_end(text[: count - len(sampled)]), (None, 0))
            if drafts is None:
                drafts = Drafts(self._store, KNNSettings())
            else:
                drafts.learn(drafted, len(sampled) - 1)
            draft = drafts.propose(text, min(self._most, self._longest - count)).tolist()
            self._pending[_identify_text_end(text)] = drafts, len(draft)
            if len(self._pending) > _MOST_PENDING:
                self._pending.popitem(last=False)
            proposed.append(draft)
        return proposed

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing. vLLM calls this method, but drafts from a store need no model."""


def _identify_text_end(text: Numbers) -> tuple[int, bytes]:
    """Return the length of a text and its last tokens as bytes. Together they identify the text's request."""
    return len(text), text[-_IDENTIFYING:].tobytes()


# 4. Requests whose retrieval failed.

_FAILURES = "knnstore_failures"
"""Name of an attribute of a runner's output: the ids of the requests whose retrieval failed in the step."""

_FAILED = "knnstore_failed"
"""Stop reason that vLLM reports if a request was ended, because its retrieval failed. A request that went on
without the store has the stop reason `FELL_BACK`."""


def _add_failures(output: Any, failures: set[str]) -> None:
    """Store the ids of failed requests in an attribute of a model runner's output, for vLLM's scheduler.

    If the output is computed later (it has a method `get_output`), the method is replaced, so that the ids
    are stored in its result.

    Args:
        output: the output of the model runner for a step.
        failures: ids of the requests whose retrieval failed in the step.
    """
    if not hasattr(output, "get_output"):
        setattr(output, _FAILURES, failures)
        return
    get_output = output.get_output

    def get_marked_output() -> Any:
        """Return the output of the runner, with the ids of the failed requests stored in it."""
        result = get_output()
        setattr(result, _FAILURES, failures)
        return result

    output.get_output = get_marked_output


def _wrap_update_from_output(update_from_output: Any) -> Any:
    """Return a wrapper of `Scheduler.update_from_output`, the scheduler's use of a step's output.

    The wrapper ends the requests whose retrieval failed in the step. With ``KNNSTORE_ON_ERROR=fallback``
    these requests go on, and their final outputs get the stop reason `FELL_BACK`, also in place of the id of
    an end token. vLLM itself adds the reason of a stop string later.

    Args:
        update_from_output: vLLM's method, which returns the outputs for each client.
    """

    @functools.wraps(update_from_output)
    def update_and_end_failed(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Call vLLM's method and return its outputs, with the outputs of failed requests added or marked."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        failures: set[str] = getattr(model_runner_output, _FAILURES, set())
        falls_back = _read_error_policy() == "fallback"
        ended = []
        if failures and not falls_back:
            ended = self.finish_requests(failures, RequestStatus.FINISHED_ERROR)
        outputs = update_from_output(self, scheduler_output, model_runner_output)
        for request in ended:
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    stop_reason=_FAILED,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        if falls_back:
            marked: set[str] = self.__dict__.setdefault(_FAILURES, set())
            marked |= failures
            for output in (one for of_client in outputs.values() for one in of_client.outputs):
                if output.finish_reason is not None and output.request_id in marked:
                    marked.discard(output.request_id)
                    output.stop_reason = FELL_BACK
            marked &= self.requests.keys()  # a request that a client has aborted has no final output
        return outputs

    return update_and_end_failed


def _wrap_process_outputs(process_outputs: Any) -> Any:
    """Return a wrapper of `OutputProcessor.process_outputs` that counts failed requests in vLLM's metrics.

    Args:
        process_outputs: vLLM's method, which runs in the front end.
    """
    from prometheus_client import Counter

    counter = Counter(
        "knnstore_failed_requests",
        "Requests whose retrieval failed, by what happened to them: fail or fallback.",
        ["action"],
    )
    actions = {_FAILED: "fail", FELL_BACK: "fallback"}
    for action in actions.values():
        counter.labels(action)

    @functools.wraps(process_outputs)
    def process_and_count(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the failed requests among the outputs, and call vLLM's method."""
        for output in engine_core_outputs:
            if output.stop_reason in actions:
                counter.labels(actions[output.stop_reason]).inc()
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    return process_and_count


def _is_head_input(model: nn.Module, place: str) -> bool:
    """Check whether the store's keys are made of the states that go into the head (the last layer).

    These states are the argument of `compute_logits`, so no hook is needed.

    Args:
        model: the loaded model.
        place: the module and its side, for example ``model:output``.
    """
    path, _, side = place.rpartition(":")
    return side == "output" and path in dict(model.named_children())


def _find_first_row_of_view(part: Tensor, whole: Tensor) -> int | None:
    """Return the index of the row of `whole` at which `part` begins, if `part` is a view of `whole`.

    Returns None if `part` has memory of its own. vLLM uses views of the hidden states to compute the logits
    of a prompt. To sample a token, it uses copies of rows.

    Args:
        part: hidden states of some consecutive tokens, or a copy of some rows.
        whole: hidden states of all tokens of the pass, with the same width.
    """
    width = whole.stride(0) * whole.element_size()
    offset = part.data_ptr() - whole.data_ptr()
    if 0 <= offset < len(whole) * width and len(part) <= len(whole) - offset // width:
        return offset // width
    return None
