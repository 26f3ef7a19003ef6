"""A store inside vLLM: a plugin that mixes the store into every logit that vLLM computes.

vLLM calls `register_vllm_plugin` in each of its processes (entry point ``knnstore`` in
``vllm.general_plugins``). It does nothing unless the environment variable ``KNNSTORE_HOME`` names a store::

    KNNSTORE_HOME=HOME vllm serve MODEL

This is the only module that uses names of vLLM. It attaches in four places:

1. `EngineArgs.create_engine_config`: before the engine starts, checks that the store fits the model.
2. `InputProcessor`: the front end checks the ``knn_*`` options of each request (HTTP 400).
3. The runners' `load_model`: after loading, the model's `compute_logits` is replaced on this instance. All
   logits go through it: those of next tokens, of drafts, and of the prompt. So penalties, grammars, sampling,
   log-probabilities, echo and the verification of drafts all use the mixture.
4. `Scheduler.update_from_output`: ends requests whose retrieval failed, with the finish reason ``error``;
   and `OutputProcessor.process_outputs` in the front end counts these requests.

vLLM changes these names between releases. Another release than `VERSIONS`, or a missing name, is an error at
the start, because vLLM would otherwise serve the bare model without notice.
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
from knnstore.lm.hosts.request_options import RequestOptions
from knnstore.lm.hosts.step_mixer import HostedSettings, Step, StepMixer, needs_all_states
from knnstore.lm.keys import Joining
from knnstore.lm.reading import check_checkpoint, check_tokenizer, prefix_of
from knnstore.lm.settings import KNNSettings, Purpose
from knnstore.store import KNNStore

HOME = "KNNSTORE_HOME"
"""Environment variable: the folder of the store. `vllm_entry` does nothing without it."""

ON_ERROR = "KNNSTORE_ON_ERROR"
"""Environment variable: ``fail`` (default) ends a request whose retrieval fails; ``fallback`` continues it
with the model alone."""

DRAFTS_HOME = "KNNSTORE_DRAFTS_HOME"
"""Environment variable: the folder of the store for `StoreDrafts`; default is that of ``KNNSTORE_HOME``."""

VERSIONS = SpecifierSet(">=0.32,<0.33")
"""Releases of vLLM that the plugin was tested with."""

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
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
"""The module of Model Runner V2."""

_IDENTIFYING, _MOST_PENDING = 16, 4096
"""Number of tokens at the end of a text that identify its request, and of requests that are remembered."""

Numbers = NDArray[np.int64]

_logger = logging.getLogger(__name__)
_is_attached = False


def attach() -> None:
    """Attach the store to the classes of vLLM in this process; a second call does nothing.

    If vLLM has another version or lacks a name, the next engine refuses to start.
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
    _wrap("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", _checking_config)
    _wrap(
        "vllm.v1.engine.input_processor",
        "InputProcessor",
        "_build_logits_processors_params_validator",
        _checking_options,
    )
    _wrap("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output", _ending_failed)
    _wrap("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs", _counting_failures)
    for module, name in _RUNNERS:
        if "load_model" in vars(getattr(importlib.import_module(module), name)):
            _wrap(module, name, "load_model", _attaching_store)


def check_vllm() -> None:
    """Check that vLLM has a tested version and all names that the plugin uses.

    Raises:
        ConfigError: it has not.
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


def _wrap(module: str, owner: str, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace the attribute `name` of a class by the result of `wrapper`, called with the attribute."""
    cls = getattr(importlib.import_module(module), owner)
    setattr(cls, name, wrapper(getattr(cls, name)))


# 1. Before the engine starts.


def _refuse_to_start(error: KnnstoreError) -> None:
    """Make the next creation of an engine raise an error."""

    def replace_by_error(_: Any) -> Any:
        def create_engine_config(*_: Any, **__: Any) -> Any:
            _raise_or_exit(error)

        return create_engine_config

    _wrap("vllm.engine.arg_utils", "EngineArgs", "create_engine_config", replace_by_error)


def _raise_or_exit(error: KnnstoreError) -> None:
    """Raise an error; in the server's commands print its message instead and exit with status 1."""
    if os.path.basename(sys.argv[0]) in ("vllm", "api_server.py"):
        sys.exit(f"knnstore: {error}")
    raise error


def _checking_config(create_engine_config: Any) -> Any:
    """Wrap the creation of vLLM's configuration: check that the store fits the model."""

    @functools.wraps(create_engine_config)
    def create_checked_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create_engine_config(self, *args, **kwargs)
        try:
            check_config(config)
        except KnnstoreError as error:
            _raise_or_exit(error)
        return config

    return create_checked_config


def check_config(config: Any) -> None:
    """Check that the store of the environment fits a configuration of vLLM.

    Raises:
        StoreNotFoundError: the home has no store.
        FingerprintMismatchError: the store was made with another model or tokenizer.
        ConfigError: vLLM is asked for something that does not work with a store.
    """
    _on_error()
    model = config.model_config
    if model.runner_type == "pooling":
        raise ConfigError(f"a store needs a model that generates text: unset {HOME} for a pooling model")
    if config.lora_config is not None:
        raise ConfigError(
            "adapters (--enable-lora) change the states that the store's keys are: leave them out"
        )
    if model.enable_prompt_embeds:
        raise ConfigError("a store needs the tokens of each prompt: leave --enable-prompt-embeds out")
    if getattr(config.parallel_config, "enable_batch_sharded_sampling", False):
        raise ConfigError("a store needs whole batches in each process: leave batch-sharded sampling out")
    with KNNStore.open(os.environ[HOME]) as store:
        check_checkpoint(store.identity, model.model, model.tokenizer, revision=model.revision)


def _on_error() -> str:
    """Return what happens to a request whose retrieval fails: ``fail`` or ``fallback``."""
    value = os.environ.get(ON_ERROR) or "fail"
    if value not in ("fail", "fallback"):
        raise ConfigError(f"{ON_ERROR} is fail or fallback, got {value!r}")
    return value


# 2. In the front end: the options of each request.


def _checking_options(build_validator: Any) -> Any:
    """Wrap the validator of sampling parameters: check the ``knn_*`` options."""

    @functools.wraps(build_validator)
    def build_checking_validator(self: Any) -> Callable[[Any], None]:
        validate = build_validator(self)
        checker = OptionChecker()

        def validate_all_params(params: Any) -> None:
            validate(params)
            checker.check(params)

        return validate_all_params

    return build_checking_validator


class OptionChecker:
    """Checks the ``knn_*`` options of requests in the front end. Threads may share the object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: KNNStore | None = None
        self._settings: HostedSettings | None = None

    def check(self, params: Any) -> None:
        """Check the options in `SamplingParams`.

        If the settings need hidden states of earlier tokens, the request is marked to compute its whole
        prompt, because vLLM's prefix cache has no hidden states. If the store cannot be read, nothing is
        checked: the engine then fails the request, or continues without the store.

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
        """Check options against the store; return True if they need hidden states of earlier tokens.

        Raises:
            ConfigError: another store is wanted, a domain does not exist, or the store cannot do what the
                options ask for.
        """
        with self._lock:
            if self._settings is None:
                self._store = KNNStore.open(os.environ[HOME])
                self._settings = HostedSettings(self._store)
            assert self._store is not None
            if options.store not in (None, self._store.id):
                raise ConfigError(f"knn_store: this server has the store {self._store.id}")
            if options.is_off:
                return False
            missing = self._settings.find_missing_domains(options)
            if missing:
                raise ConfigError(f"knn_domains: the store has no domain {missing[0]!r}")
            settings = self._settings.resolve(options, Purpose.SCORING)
            if self._store.is_keyless and settings.retrieves:
                raise ConfigError("knn_lambda: the store has no keys, it retrieves with n-grams only")
            _, joining = Joining.parse(self._store.identity.key)
            return needs_all_states(settings, joining)


# 3. In the workers: the logits.


def _attaching_store(load_model: Any) -> Any:
    """Wrap the loading of a model: attach the store to the loaded model."""

    @functools.wraps(load_model)
    def load_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
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
    """Keeps the hidden states at the place of the keys in the latest forward pass of a vLLM model.

    Args:
        model: the loaded model.
        place: the place as in a store's identity, for example ``model.layers.29.mlp:input``.
    """

    def __init__(self, model: nn.Module, place: str) -> None:
        path, _, side = place.rpartition(":")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise ConfigError(
                f"the store's keys are taken at {place}, which {type(model).__name__} of vLLM does not have: "
                "make a store with --key final_hidden"
            ) from None
        self._buffer: Tensor | None = None
        if side == "input":
            module.register_forward_pre_hook(self._keep_input, with_kwargs=True)
        else:
            module.register_forward_hook(self._keep_output)

    def states(self, count: int) -> Tensor:
        """Return the states of the first `count` tokens of the pass, shape (count, width)."""
        assert self._buffer is not None
        return self._buffer[:count]

    def _keep_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._keep((*args, *kwargs.values()))

    def _keep_output(self, _: nn.Module, __: Any, output: Any) -> None:
        self._keep(output if isinstance(output, tuple) else (output,))

    def _keep(self, values: tuple[Any, ...]) -> None:
        """Copy the states into a buffer that stays in place, so that a CUDA graph can replay the copy.

        vLLM's normalizations take the residual as a second tensor and add it; the sum is the state.
        """
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        states = tensors[0]
        if len(tensors) > 1 and tensors[1].shape == states.shape:
            states = states + tensors[1]
        if self._buffer is None or len(self._buffer) < len(states):
            self._buffer = torch.empty_like(states)
        self._buffer[: len(states)].copy_(states)


class Attachment(ABC):
    """Attaches a store to a model runner; the subclasses know where each runner keeps its batch.

    Args:
        runner: the runner, after its model was loaded.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.distributed import get_tp_group
        from vllm.platforms import current_platform

        self._runner = runner
        self._hidden: Tensor | None = None
        self._tap: StateTap | None = None
        self.mixer: StepMixer | None = None
        # Each rank of a tensor parallel group samples for itself, so all need the same mixed logits.
        self._group = get_tp_group()
        self._is_shared = self._group.world_size > 1 and current_platform.use_all_gather()
        if self._group.rank_in_group == 0:
            self._open_store()
        self._compute_logits = runner.model.compute_logits
        runner.model.compute_logits = self.compute_logits

    def _open_store(self) -> None:
        """Open the store, and attach to the model's module where its keys are taken."""
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
        """Register a request that begins, or that Model Runner V2 resumes; `new` is its `NewRequestData`."""
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
        """Extend the texts by a forward pass.

        Args:
            hidden: final hidden states of the pass, the input of the head, shape (n or more, h).
            count: number of tokens of the pass, n.
        """
        self._hidden = hidden
        if self.mixer is not None and not self.mixer.is_idle:
            self.mixer.extend_texts(hidden[:count] if self._tap is None else self._tap.states(count))

    def remove_request(self, name: str) -> None:
        """Forget a request that has ended."""
        if self.mixer is not None:
            self.mixer.remove_request(name)

    def begin_step(self, names: Sequence[str], starts: Numbers, tokens: Tensor, positions: Tensor) -> None:
        """Begin a step.

        Args:
            names: ids of the b requests of the batch.
            starts: see `Step.starts`.
            tokens: the model's input of at least n token ids.
            positions: their positions, at least n.
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
        """End the step, and return the runner's output with the failures of the step.

        Until the next step logits stay as they are, because vLLM's trial passes have no step.
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
        """Compute the model's logits, and mix the store into them if this is a step.

        Args:
            hidden: final hidden states of some rows of the step, shape (m, h).
            *args: further arguments of the model's method.
            **kwargs: likewise.
        """
        logits: Tensor | None = self._compute_logits(hidden, *args, **kwargs)
        if self._hidden is None or logits is None or not len(logits):
            return logits
        first = _first_row(hidden, self._hidden)
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
        """Return the row of the pass of each row whose next token is sampled, int64, shape (m,)."""


class FirstRunnerAttachment(Attachment):
    """Attaches a store to Model Runner V1, whose batch is the attribute `input_batch`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._logits_indices: Tensor | None = None
        self._count = 0
        prepare, forward, sample = runner._prepare_inputs, runner._model_forward, runner.sample_tokens

        def _prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = prepare(scheduler_output, *args, **kwargs)
            self._begin_step(scheduler_output, inputs[0])
            return inputs

        def _model_forward(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._count:
                self.extend_texts(output[0] if isinstance(output, tuple) else output, self._count)
            return output

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
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
        """Begin a step with the batch that the runner has prepared."""
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
    """Attaches a store to Model Runner V2, which passes its batch to `sample`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._batch: Any = None
        add, remove = runner.add_requests, runner.finish_requests
        sample, sample_tokens = runner.sample, runner.sample_tokens

        def add_requests(scheduler_output: Any) -> Any:
            for new in scheduler_output.scheduled_new_reqs:
                self.add_request(new)
            return add(scheduler_output)

        def finish_requests(scheduler_output: Any) -> Any:
            for name in scheduler_output.finished_req_ids:
                self.remove_request(name)
            return remove(scheduler_output)

        def sample_batch(hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
            self._begin_step(hidden_states, input_batch)
            return sample(hidden_states, input_batch, grammar_output)

        def sample_step(*args: Any, **kwargs: Any) -> Any:
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
        """Begin a step with the batch that the runner samples from."""
        self._batch = batch
        starts = batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64)
        self.begin_step(batch.req_ids, starts, batch.input_ids, batch.positions)
        self.extend_texts(hidden, int(starts[-1]))


# Drafts, which vLLM asks for by the name of the class.


class StoreDrafts:
    """Proposes drafts from the text of a store; with or without the mixture, and for any model.

    A draft continues the last tokens of a text as the store's documents, or the text itself, continued them;
    see `Drafts`. vLLM verifies drafts, so the generated text stays the same. Only Model Runner V1 has this
    interface. Start vLLM with::

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
            raise ConfigError(f"drafts need a store: set {DRAFTS_HOME}, or {HOME}, to its home")
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
        """Draft the next tokens of each request of a batch.

        Args:
            sampled_token_ids: the tokens that each of b requests got in this step; empty for a request whose
                prompt is not complete, which gets no draft.
            num_tokens_no_spec: number of tokens of each request, shape (b or more,).
            token_ids_cpu: tokens of each request, shape (b or more, longest).
            **_: further arguments of vLLM, not used.

        Returns:
            The draft of each request, possibly empty.
        """
        proposed = list[list[int]]()
        for row, sampled in enumerate(sampled_token_ids):
            count = int(num_tokens_no_spec[row])
            if not len(sampled) or count >= self._longest:
                proposed.append([])
                continue
            text = token_ids_cpu[row, :count].astype(np.int64)
            # vLLM does not say which request a row is, so the end of its text identifies it.
            drafts, drafted = self._pending.pop(_end_of(text[: count - len(sampled)]), (None, 0))
            if drafts is None:
                drafts = Drafts(self._store, KNNSettings())
            else:
                drafts.learn(drafted, len(sampled) - 1)
            draft = drafts.propose(text, min(self._most, self._longest - count)).tolist()
            self._pending[_end_of(text)] = drafts, len(draft)
            if len(self._pending) > _MOST_PENDING:
                self._pending.popitem(last=False)
            proposed.append(draft)
        return proposed

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: the drafts need no model."""


def _end_of(text: Numbers) -> tuple[int, bytes]:
    """Return the length and the last tokens of a text, which identify its request."""
    return len(text), text[-_IDENTIFYING:].tobytes()


# 4. Requests whose retrieval failed.

_FAILURES = "knnstore_failures"
"""Attribute of a runner's output: ids of the requests that failed in the step."""

_FAILED, _FELL_BACK = "knnstore_failed", "knnstore_fallback"
"""Stop reason of a request whose retrieval failed, and that ended for this or went on without the store."""


def _add_failures(output: Any, failures: set[str]) -> None:
    """Attach the ids of failed requests to the output of a runner, which may be asynchronous."""
    if not hasattr(output, "get_output"):
        setattr(output, _FAILURES, failures)
        return
    get_output = output.get_output

    def get_marked_output() -> Any:
        result = get_output()
        setattr(result, _FAILURES, failures)
        return result

    output.get_output = get_marked_output


def _ending_failed(update_from_output: Any) -> Any:
    """Wrap the scheduler's use of a step's output: end failed requests, or mark them at their end."""

    @functools.wraps(update_from_output)
    def update_and_end_failed(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        failures: set[str] = getattr(model_runner_output, _FAILURES, set())
        falls_back = _on_error() == "fallback"
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
                    output.stop_reason = output.stop_reason or _FELL_BACK
        return outputs

    return update_and_end_failed


def _counting_failures(process_outputs: Any) -> Any:
    """Wrap the front end's use of outputs: count failed requests in vLLM's metrics."""
    from prometheus_client import Counter

    counter = Counter(
        "knnstore_failed_requests",
        "Requests whose retrieval failed, by what happened to them: fail or fallback.",
        ["action"],
    )
    actions = {_FAILED: "fail", _FELL_BACK: "fallback"}
    for action in actions.values():
        counter.labels(action)

    @functools.wraps(process_outputs)
    def process_and_count(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if output.stop_reason in actions:
                counter.labels(actions[output.stop_reason]).inc()
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    return process_and_count


def _is_head_input(model: nn.Module, place: str) -> bool:
    """Check whether a place of keys is the input of the head, which needs no hook."""
    path, _, side = place.rpartition(":")
    return side == "output" and path in dict(model.named_children())


def _first_row(part: Tensor, whole: Tensor) -> int | None:
    """Return the first row of `whole` that `part` is a view of; None if it is a copy.

    vLLM computes the prompt's logits from slices of the hidden states, and samples from copies of rows.
    """
    width = whole.stride(0) * whole.element_size()
    offset = part.data_ptr() - whole.data_ptr()
    if 0 <= offset < len(whole) * width and len(part) <= len(whole) - offset // width:
        return offset // width
    return None
