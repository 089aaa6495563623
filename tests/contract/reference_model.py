"""Models of transformers with other weights than an engine's, and the log-probabilities that they give.

The functions that take folders are for another process: where vLLM serves a model of transformers, it changes the
model's class for the whole process.
"""

from types import SimpleNamespace

import model_families as mf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore


def changed(folder):
    """The model after an update of every weight."""
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return lm


def publish(lm, folder, version):
    """Publish the model's weights in a store, as the given version."""
    tensors = dict(lm.named_parameters())
    plan = WeightPlan.of([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
    folder.mkdir(exist_ok=True)
    store = WeightStore.create(folder, plan, writers=1)
    shards = [SimpleNamespace(name=n, offset=0, tensor=t, constant=False) for n, t in tensors.items()]
    store.write_shards(0, version, shards)
    store.commit(version)
    return folder


@torch.inference_mode()
def logits(lm, request, tokens):
    """float32 `[tokens, vocabulary]` that predict the tokens, by one plain forward."""
    sequence = torch.from_numpy(np.concatenate([request.prompt, tokens]).astype(np.int64)).unsqueeze(0)
    return lm(sequence).logits[0, len(request.prompt) - 1 : -1].float()


def error(lm, requests, done):
    """The largest difference between a log-probability and that of a plain forward."""
    worst = 0.0
    for request in requests:
        got = done[request.id]
        logprobs = torch.log_softmax(logits(lm, request, got.tokens), -1)
        expected = logprobs.gather(1, torch.from_numpy(got.tokens.astype(np.int64)).unsqueeze(1)).squeeze(1)
        worst = max(worst, float(np.abs(got.logprobs - expected.numpy()).max()))
    return worst


def make_versions(folder, name, fields):
    """Writes a model and, in folders with the numbers of the versions, two with other weights."""
    mf.make_model(folder, name, fields)
    for version, factor in (4, 1.0), (5, 1.1):
        lm = changed(folder)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.mul_(factor)
        lm.save_pretrained(folder / str(version))


def publish_folder(folder, store, version):
    publish(AutoModelForCausalLM.from_pretrained(folder), store, version)


def error_of_folder(folder, requests, done):
    return error(AutoModelForCausalLM.from_pretrained(folder).eval(), requests, done)
