"""The papers' models to compare, tiny. Without dropout: plain PyTorch draws other numbers."""

from __future__ import annotations

from functools import partial

from examples.models import alexnet, faces, images, inception, recurrent, resnet, wide_deep
from tools.model_cases import Case

_CELLS = {"vocabulary": 12, "width": 8, "layers": 2}

CASES: dict[str, Case] = {
    "alexnet": Case(
        partial(alexnet.AlexNet, 5, 63, (4, 8, 8, 8, 4), 16, dropout=0.0),
        images.loss,
        partial(images.batch, side=63, classes=5),
        alexnet.LAYOUTS,
    ),
    "inception-v3": Case(
        partial(inception.Inception, 5, 4, (1, 1, 1), dropout=0.0),
        images.loss,
        partial(images.batch, side=79, classes=5),
        inception.LAYOUTS,
        size=8,
    ),
    "resnet-50": Case(
        partial(resnet.ResNet, resnet.RESNET_50, 5, 4),
        images.loss,
        partial(images.batch, side=64, classes=5),
        resnet.LAYOUTS,
        size=8,
    ),
    "resnet-101": Case(
        partial(resnet.ResNet, resnet.RESNET_101, 5, 4),
        images.loss,
        partial(images.batch, side=64, classes=5),
        resnet.LAYOUTS,
        size=8,
    ),
    "rnnlm": Case(
        partial(recurrent.LanguageModel, **_CELLS),
        recurrent.next_token_loss,
        partial(recurrent.texts, time=3, vocabulary=12),
        recurrent.LAYOUTS,
    ),
    "rnntc": Case(
        partial(recurrent.Classifier, classes=4, **_CELLS),
        recurrent.class_loss,
        partial(recurrent.texts, time=3, vocabulary=12, classes=4),
        recurrent.LAYOUTS,
    ),
    "nmt": Case(
        partial(recurrent.Translation, **_CELLS),
        recurrent.translation_loss,
        partial(recurrent.sentence_pairs, time=3, vocabulary=12),
        recurrent.LAYOUTS,
    ),
    "wide & deep": Case(
        partial(wide_deep.WideDeep, 50, 3, 4, 4, (8, 8)),
        wide_deep.loss,
        partial(wide_deep.batch, vocabulary=50, fields=3, dense=4),
        wide_deep.LAYOUTS,
    ),
    "faces": Case(
        partial(faces.FaceRecognition, 10, 8, (1, 1), 4),
        faces.loss,
        partial(images.batch, side=16, classes=10),
        faces.LAYOUTS,
    ),
}
