"""Training, its operations and their results."""

from __future__ import annotations

from gateway import custom_losses
from gateway.api.description import answers as a
from gateway.api.description.base import NO_CONTENT, Answer, Binary, Described, Header, json
from gateway.api.description.table import Table
from gateway.api.tinker import create_model, futures, sampling, service, training
from gateway.api.tinker.sample_body import Sample
from gateway.api.wire import PROTOBUF
from gateway.runs.operations import (
    LoadWeights,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from tandem.errors import (
    CustomLossInvalid,
    Overloaded,
    SessionFinished,
    StorageFull,
    UnknownModel,
    UnknownRequest,
    UnknownRun,
    UnknownSampler,
    UnknownSession,
    UnknownWeights,
)

_FORWARD_BACKWARD = Binary(PROTOBUF, "ForwardBackwardRequest of protos/tandem/wire/v1/tinker.proto")
_RESULT = Binary(
    PROTOBUF, "ForwardBackwardOutput or SampleResponse of protos/tandem/wire/v1/tinker.proto"
)
_COMPRESSED = Header("Content-Encoding", "How the body is packed", ("identity", "zstd"))
_LOGGED = (UnknownRun, SessionFinished, Overloaded)
_LATER = (
    "A body that names its run and its place but is wrong otherwise is accepted, takes its place "
    "in the run's log, and fails there: `retrieve_future` says why."
)

TRAINING: Table = {
    training.forward_backward: Described(
        takes_binary=_FORWARD_BACKWARD,
        headers=(_COMPRESSED,),
        answers=json(a.Promise),
        errors=_LOGGED,
        rules=(_LATER, "The body must name a run and a place of at least 1."),
    ),
    training.optim_step: Described(
        takes=((training.Place, training.OptimStepFields),),
        answers=json(a.Promise),
        errors=_LOGGED,
        rules=(_LATER, "A step takes either `adam_params` or `optimizer_params`."),
    ),
    training.save_weights: Described(
        takes=((training.Place, SaveWeights),),
        answers=json(a.Promise),
        errors=_LOGGED,
        rules=(_LATER,),
    ),
    training.save_weights_for_sampler: Described(
        takes=((training.Place, SaveWeightsForSampler),),
        answers=json(a.Promise),
        errors=_LOGGED,
        rules=(_LATER,),
    ),
    training.save_weights_external: Described(
        takes=((training.Place, SaveWeightsExternal),),
        answers=json(a.Promise),
        errors=_LOGGED,
        rules=(_LATER,),
    ),
    training.load_weights: Described(
        takes=(
            (training.Addressing, training.Place, LoadWeights),
            (training.Addressing, create_model.CreateViaLoad, training.Lent, LoadWeights),
        ),
        answers=json(a.Promise),
        errors=(*_LOGGED, UnknownSession, UnknownModel, UnknownWeights),
        rules=(
            _LATER,
            "A new run is made where `session_id` is given; its path must be that of a training "
            "checkpoint that fits the model and the training asked for.",
        ),
    ),
    create_model.create_model: Described(
        takes=((create_model.CreateModel,),),
        answers=json(a.Promise),
        errors=(UnknownSession, UnknownModel, SessionFinished),
        rules=(
            "The optimizer must be one that is there, and a LoRA configuration must train "
            "something.",
        ),
    ),
    training.get_info: Described(
        takes=((training.ModelId,),), answers=json(a.RunInfo), errors=(UnknownRun, SessionFinished)
    ),
    custom_losses.create_custom_loss: Described(
        takes=((custom_losses.CreateCustomLoss,),),
        answers=json(a.LossPromise),
        errors=(UnknownSession, SessionFinished, CustomLossInvalid),
        rules=("The rest of the body is the traced loss (docs/custom-losses.md).",),
    ),
    service.forward_of_old_sdk: Described(
        rules=("Always refused: the SDK that calls it is too old.",),
    ),
    futures.retrieve_future: Described(
        takes=((futures.Retrieve,),),
        answers={
            200: Answer(
                contents=(
                    a.FailedOperation,
                    a.ResultSize,
                    a.RunCreated,
                    a.Stepped,
                    a.StateSaved,
                    a.SavedForSampler,
                    a.Exported,
                    a.StateLoaded,
                    a.CustomLossCreated,
                    _RESULT,
                ),
                about="The result, by the kind of the operation, or why there is none.",
            ),
            408: Answer(contents=(a.TryAgain,), about="It has not ended; ask again."),
            410: Answer(contents=(a.FailedOperation,), about="A sample to be asked for again."),
        },
        errors=(UnknownRequest,),
    ),
    futures.retrieve_futures: Described(
        takes=((futures.RetrieveMany,),),
        answers={
            **json(a.Completions),
            410: Answer(contents=(a.FailedOperation,), about="The cursor is an earlier gateway's."),
        },
        errors=(UnknownSampler,),
    ),
    futures.cancel_future: Described(
        takes=((futures.Cancel,),),
        answers=NO_CONTENT,
        errors=(UnknownRequest,),
        rules=("Only samples can be cancelled.",),
    ),
    sampling.create_sampling_session: Described(
        takes=((sampling.CreateSamplingSession,),),
        answers=json(a.CreatedSamplingSession),
        errors=(UnknownSession, SessionFinished, UnknownModel, UnknownWeights),
        rules=("Either `base_model` or `model_path` is needed, and the path must be one.",),
    ),
    sampling.join_sampling_session: Described(
        takes=((sampling.Join,),), answers=json(a.Joined), errors=(UnknownSampler,)
    ),
    sampling.get_sampler: Described(answers=json(a.SamplerInfo), errors=(UnknownSampler,)),
    sampling.asample: Described(
        takes=((Sample,),),
        answers=json(a.SamplePromise),
        errors=(
            UnknownSampler,
            SessionFinished,
            UnknownModel,
            UnknownWeights,
            Overloaded,
            StorageFull,
        ),
        rules=(
            "Either a `sampling_session_id` with a `seq_id`, or a `base_model`, or a `model_path`.",
            "The prompt is text alone, with at least one token; every token is a token id.",
        ),
    ),
}
