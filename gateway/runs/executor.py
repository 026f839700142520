"""How each kind of operation is carried out, and what is sent to the client for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from gateway.checkpoints.catalog import CheckpointCatalog
from gateway.checkpoints.versions import VersionStore
from gateway.futures.table import Outcome, Result
from gateway.identifiers import check_name, check_ttl, parse_checkpoint_path
from gateway.metrics import Metrics
from gateway.runs.delivery import Delivery, RunProgress, json_result
from gateway.runs.dispatcher import Call, Send
from gateway.runs.operations import (
    AdamParams,
    Body,
    DimuonParams,
    LoadWeights,
    LossDefinitions,
    LossReference,
    Operation,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from gateway.runs.saves import Saves, ServesVersions
from gateway.sampling.sessions import SamplingSessionRegistry
from gateway.usage.meter import RunMeter
from gateway.workers.clients import TrainerClient
from tandem.errors import InvalidRequest, TandemError, from_failure
from tandem.settings import GatewaySettings
from tandem.v1 import trainer_pb2


class Executor:
    """Implements `dispatch.Prepare` for one run.

    `fate` waits for the launcher's word after the connection broke: the error that ended the
    run, or None when the trainer lives after all.
    """

    def __init__(
        self,
        *,
        facts: RunProgress,
        client: TrainerClient,
        sampler: Callable[[], ServesVersions],
        sampling: SamplingSessionRegistry,
        checkpoints: CheckpointCatalog,
        versions: VersionStore,
        loss_definitions: Mapping[str, LossDefinitions],
        metrics: Metrics,
        meter: RunMeter,
        settings: GatewaySettings,
        fate: Callable[[], Awaitable[TandemError | None]],
    ) -> None:
        self._facts = facts
        self._client = client
        self._loss_definitions = loss_definitions
        self._delivery = Delivery(facts=facts, meter=meter, fate=fate)
        self._saves = Saves(
            facts=facts,
            client=client,
            delivery=self._delivery,
            sampler=sampler,
            sampling=sampling,
            checkpoints=checkpoints,
            versions=versions,
            metrics=metrics,
            data_dir=settings.data_dir,
        )

    async def __call__(self, operation: Operation, /) -> Send:
        match operation.body:
            case None:
                return await self._forward_backward(operation)
            case LossReference() as body:
                definition = b""
                if (known := self._loss_definitions.get(body.loss_fn)) is not None:
                    definition = await known.definition(
                        body.loss_id, session_id=self._facts.session_id
                    )
                return await self._forward_backward(operation, loss_definition=definition)
            case OptimStep() as body:
                return partial(self._optim_step, operation, body)
            case SaveWeights() as body:
                return await self._saves.state(operation, body)
            case SaveWeightsForSampler() as body:
                return await self._saves.for_sampler(operation, body)
            case SaveWeightsExternal() as body:
                return await self._saves.external(operation, body)
            case LoadWeights() as body:
                return await self._saves.load(operation, body)

    async def _forward_backward(
        self, operation: Operation, *, loss_definition: bytes = b""
    ) -> Send:
        payload = await operation.read_payload()

        async def send(call: Call) -> Outcome:
            request = trainer_pb2.ForwardBackwardRequest(
                header=self._delivery.header(operation, call),
                payload=payload,
                loss_definition=loss_definition,
            )
            reply = await self._delivery.deliver(
                operation, lambda: self._client.forward_backward(request)
            )
            if reply.HasField("failure"):
                return from_failure(reply.failure)
            return Result(media="protobuf", body=reply.output)

        return send

    async def _optim_step(self, operation: Operation, body: OptimStep, call: Call) -> Outcome:
        request = trainer_pb2.OptimStepRequest(
            header=self._delivery.header(operation, call),
            gradients_incomplete=call.gradients_incomplete,
        )
        match body.params:
            case AdamParams() as adam:
                request.adamw.CopyFrom(trainer_pb2.AdamWParams(**adam.model_dump()))
            case DimuonParams() as dimuon:
                params = trainer_pb2.DiMuonParams(**dimuon.model_dump(exclude={"type"}))
                request.dimuon.CopyFrom(params)
        reply = await self._delivery.deliver(operation, lambda: self._client.optim_step(request))
        if reply.HasField("failure"):
            return from_failure(reply.failure)
        self._facts.step = reply.step
        return json_result(type="optim_step", metrics=dict(reply.metrics))


def check_names(body: Body) -> None:
    """What can be said of a request before its turn. Raises `InvalidRequest`."""
    match body:
        case LoadWeights():
            parse_checkpoint_path(body.path)
        case SaveWeights() | SaveWeightsExternal():
            check_name(body.path)
            check_ttl(body.ttl_seconds)
        case SaveWeightsForSampler() if body.path is not None:
            check_name(body.path)
            check_ttl(body.ttl_seconds)
        case SaveWeightsForSampler() if body.sampling_session_seq_id is None:
            raise InvalidRequest(
                "save_weights_for_sampler needs a path or a sampling_session_seq_id"
            )
        case _:
            pass
