"""Handwritten models with features of real training code, described in their docstrings. All are small, with random weights."""

from collections.abc import Callable

from benchmarks.models import dense, images, sequences
from planner.models import Workload

MODELS: dict[str, Callable[[], Workload]] = {
    make.__name__: make
    for make in (
        dense.mlp,
        dense.mlp_in_place,
        dense.autoencoder,
        dense.moe,
        dense.hypernetwork,
        dense.parametrized,
        dense.custom_function,
        dense.lora,
        dense.frozen_backbone,
        dense.physics_informed,
        dense.siamese,
        dense.recommender,
        dense.graph_network,
        images.residual_cnn,
        images.unet,
        images.feature_pyramid,
        images.generator,
        images.variational,
        images.convnext,
        images.mixer,
        images.multi_task,
        sequences.transformer_classifier,
        sequences.gpt,
        sequences.translator,
        sequences.lstm_tagger,
        sequences.recurrent_cells,
        sequences.temporal_convolutions,
        sequences.state_space,
    )
}
