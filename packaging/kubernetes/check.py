#!/usr/bin/env python3
"""Whether the manifests here are what Kubeflow's own schemas describe: every field is known and has the right type.

usage: check.py     in an environment with PyPI's kubeflow_trainer_api, kubeflow-training and pyyaml

The MPI operator's kubeflow.org/v2beta1 is compared with the fields that it shares with kubeflow.org/v1, whose models PyPI has.
"""
import pathlib
import sys

import yaml
from kubeflow.training.models import KubeflowOrgV1MPIJob
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubernetes import client

HERE = pathlib.Path(__file__).resolve().parent


def trainer_problems(manifest: dict) -> list[str]:
    """Fields that the model does not know are missing from what it gives back."""
    known = TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()

    def compare(ours, theirs, where: str) -> list[str]:
        if isinstance(ours, dict):
            return [p for key, value in ours.items()
                    for p in ([f"{where}.{key} is unknown"] if key not in theirs
                              else compare(value, theirs[key], f"{where}.{key}"))]
        if isinstance(ours, list):
            return [p for i, (a, b) in enumerate(zip(ours, theirs)) for p in compare(a, b, f"{where}[{i}]")]
        return [] if ours == theirs else [f"{where} is {ours!r}, understood as {theirs!r}"]

    return compare(manifest, known, "TrainJob")


def model_problems(value, model, where: str) -> list[str]:
    """The same for the generated models of kubernetes and training-operator, whose types are text."""
    if model.startswith("list["):
        return [p for i, v in enumerate(value) for p in model_problems(v, model[5:-1], f"{where}[{i}]")]
    if model.startswith("dict("):
        inner = model[5:-1].split(", ")[1]
        return [p for k, v in value.items() for p in model_problems(v, inner, f"{where}.{k}")]
    plain = {"str": str, "int": int, "bool": bool}.get(model)
    if plain is not None:
        return [] if type(value) is plain else [f"{where} is {value!r}, no {model}"]
    import kubeflow.training.models as training
    cls = getattr(training, model, None) or getattr(client, model)
    names = {json: python for python, json in cls.attribute_map.items()}
    return [p for key, v in value.items()
            for p in ([f"{where}.{key} is unknown"] if key not in names
                      else model_problems(v, cls.openapi_types[names[key]], f"{where}.{key}"))]


def main() -> None:
    problems = trainer_problems(yaml.safe_load((HERE / "trainjob.yaml").read_text()))
    problems += model_problems(yaml.safe_load((HERE / "mpijob.yaml").read_text()), KubeflowOrgV1MPIJob.__name__, "MPIJob")
    print("\n".join(problems) or "both manifests are what their schemas describe")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
