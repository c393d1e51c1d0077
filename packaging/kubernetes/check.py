#!/usr/bin/env python3
"""Whether the manifests here are what Kubeflow's own schemas describe: every field is known and has the right type.

usage: check.py     needs PyPI's kubeflow_trainer_api, kubeflow-training and pyyaml, which `scripts/setup.sh kubernetes` installs into
                    build/kubernetes; exit code 77 without them

The MPI operator's kubeflow.org/v2beta1 is compared with the fields that it shares with kubeflow.org/v1, whose models PyPI has.
Each manifest is also damaged in several ways, which have to be found.
"""
import copy
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
INSTALLED = HERE.parents[1] / "build/kubernetes/bin/python"
try:
    import yaml
    from kubeflow.training.models import KubeflowOrgV1MPIJob
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
    from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime
    from kubernetes import client
except ImportError as problem:
    if INSTALLED.exists() and pathlib.Path(sys.prefix) != INSTALLED.parents[1]:
        os.execv(INSTALLED, [str(INSTALLED), __file__])
    print(f"skipped: {problem} (scripts/setup.sh kubernetes installs what this needs)")
    sys.exit(77)


def trainer_problems(manifest: dict) -> list[str]:
    """Fields that the model does not know are missing from what it gives back."""
    kind = manifest["kind"]
    model = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}[kind]
    try:
        known = model.from_dict(manifest).to_dict()
    except ValueError as problem:
        return [f"{kind}: {problem}"]

    def compare(ours, theirs, where: str) -> list[str]:
        if isinstance(ours, dict):
            return [p for key, value in ours.items()
                    for p in ([f"{where}.{key} is unknown"] if key not in theirs
                              else compare(value, theirs[key], f"{where}.{key}"))]
        if isinstance(ours, list):
            return [p for i, (a, b) in enumerate(zip(ours, theirs)) for p in compare(a, b, f"{where}[{i}]")]
        return [] if ours == theirs else [f"{where} is {ours!r}, understood as {theirs!r}"]

    return compare(manifest, known, kind)


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


def mpi_problems(manifest: dict) -> list[str]:
    return model_problems(manifest, KubeflowOrgV1MPIJob.__name__, "MPIJob")


# Which the models take as any text.
VERSIONS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
            "MPIJob": "kubeflow.org/v2beta1"}


def version_problems(manifest: dict) -> list[str]:
    kind, version = manifest.get("kind"), manifest.get("apiVersion")
    return [] if version is not None and VERSIONS.get(kind) == version else [f"{kind} of {version} is none of {VERSIONS}"]


JOB = "spec.template.spec.replicatedJobs.0.template.spec"
RULE = JOB + ".podFailurePolicy.rules.0"
# Fields that are called otherwise, or have a value of another type.
RENAMED = {"trainjob.yaml": {"spec.trainer": "trainers", "spec.trainer.numNodes": "nodes", "spec.runtimeRef.name": "called"},
           "runtime.yaml": {f"{JOB}.podFailurePolicy": "failurePolicy", f"{RULE}.onExitCodes.containerName": "container"},
           "mpijob.yaml": {"apiVersion": "version", "spec.slotsPerWorker": "slots",
                           "spec.mpiReplicaSpecs.Worker.replicas": "count"}}
REPLACED = {"trainjob.yaml": {"apiVersion": "trainer.kubeflow.org/v1", "spec.trainer.numNodes": ["two"],
                              "spec.trainer.args": "fashion_mnist", "spec.runtimeRef.name": 7},
            "runtime.yaml": {f"{RULE}.onExitCodes.values": ["75"], f"{RULE}.action": 75},
            "mpijob.yaml": {"apiVersion": "kubeflow.org/v1", "kind": "TrainJob", "spec.slotsPerWorker": "four",
                            "spec.runPolicy.cleanPodPolicy": 1, "spec.mpiReplicaSpecs.Worker.replicas": "two"}}


def damaged(manifest: dict, name: str):
    """Where it was damaged, and what came of it."""
    for change in (RENAMED, REPLACED):
        for where, instead in change[name].items():
            other = copy.deepcopy(manifest)
            *path, field = where.split(".")
            at = other
            for step in path:
                at = at[int(step) if isinstance(at, list) else step]
            value = at.pop(field)
            at[instead if change is RENAMED else field] = value if change is RENAMED else instead
            yield where, other


def main() -> None:
    problems = []
    for name, model in (("trainjob.yaml", trainer_problems), ("runtime.yaml", trainer_problems), ("mpijob.yaml", mpi_problems)):
        def look(manifest: dict, model=model) -> list[str]:
            return version_problems(manifest) or model(manifest)

        manifest = yaml.safe_load((HERE / name).read_text())
        problems += [f"{name}: {problem}" for problem in look(manifest)]
        problems += [f"{name}: with another {where} nothing is found" for where, other in damaged(manifest, name)
                     if not look(other)]
    print("\n".join(problems) or "all manifests are what their schemas describe")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
