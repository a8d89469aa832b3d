"""Pulls models from the hub into huggingface_hub's own cache, where every library finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.core import PenstockError
from penstock.files import CONFIG_FILE
from penstock.library.choice import chosen_gguf, gguf_models, gguf_named, has_safetensors, no_weights, small_files
from penstock.library.download import GIT_BLOB, Download, check_space, fetch
from penstock.library.reference import HubModel
from penstock.library.refusals import one_line
from penstock.models.places import has_weights, weights_of

ANSWER_S: Final = 10.0
"""Seconds in which the hub has to say what a repository holds."""


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file as the hub lists it. ``size`` is in bytes; ``sha256`` is empty for small files, which have a ``blob``."""

    name: str
    size: int
    blob: str
    sha256: str = ""

    @property
    def etag(self) -> str:
        """The file's name in the cache: its checksum."""
        return self.sha256 or self.blob


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository at a commit, as the hub lists it."""

    model: HubModel
    commit: str
    files: dict[str, HubFile]

    def downloads(self, names: Iterable[str]) -> list[Download]:
        """The downloads of these files, which end at once where the cache has one."""
        from huggingface_hub import hf_hub_url

        model, blobs = self.model, folder_of(self.model) / "blobs"
        found = (self.files[name] for name in names)
        return [
            Download(
                typed=model.typed,
                url=hf_hub_url(model.repo, file.name, revision=self.commit),
                place=blobs / file.etag,
                size=file.size,
                algorithm="sha256" if file.sha256 else GIT_BLOB,
                checksum=file.etag,
            )
            for file in found
        ]

    def pull(self, names: Sequence[str]) -> Path:
        """The snapshot's folder, with these files in it. Raises PenstockError like ``fetch``."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import build_hf_headers

        for one in self.downloads(names):
            fetch(one, build_hf_headers())
        for name in names:  # the files are there, so that nothing is left but to name them in the snapshot
            hf_hub_download(self.model.repo, name, revision=self.commit)
        self._name_commit()
        return folder_of(self.model) / "snapshots" / self.commit

    def _name_commit(self) -> None:
        """Write down, where huggingface_hub reads it, which commit the branch is."""
        if self.model.revision != self.commit:
            ref = folder_of(self.model) / "refs" / self.model.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)


def folder_of(model: HubModel) -> Path:
    """The repository's folder in the cache, which need not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / str(repo_folder_name(repo_id=model.repo, repo_type="model"))


def kept_place(model: HubModel) -> Path | None:
    """The model's GGUF file or folder in the cache, if all of it is there."""
    folder = folder_of(model)
    ref = folder / "refs" / model.revision
    commit = ref.read_text().strip() if ref.is_file() else model.revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    if model.file:
        names = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf") if file.is_file()]
        found = gguf_named(names, model.file)
        return snapshot / found[0] if len(found) == 1 and is_whole(found[0], gguf_models(names)[found[0]]) else None
    return snapshot if (snapshot / CONFIG_FILE).is_file() and has_weights(snapshot) else None


def is_whole(first: str, files: Sequence[str]) -> bool:
    """Whether these are all files that a GGUF model is split over."""
    from penstock.files import split_files

    return len(split_files(Path(first))) == len(files)


def look_up(model: HubModel) -> Repository:
    """The repository and its files. Raises Unreachable for a hub that does not answer, ConfigError for a refusal."""
    from huggingface_hub import HfApi

    with one_line(model.typed):
        found = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True, timeout=ANSWER_S)
    files = {
        one.rfilename: HubFile(
            name=one.rfilename,
            size=one.size or 0,
            blob=one.blob_id or "",
            sha256=one.lfs.sha256 if one.lfs is not None else "",
        )
        for one in found.siblings or ()
    }
    return Repository(model=model, commit=found.sha, files=files)


def pull(model: HubModel, announce: Callable[[int, Path], None]) -> Path:
    """Fetch the model's GGUF file or its folder, whose path is returned.

    ``announce`` is told how many bytes are missing, and where they go. Raises PenstockError, in one line.
    """
    repository = look_up(model)
    check_pinned(model, repository)
    names = list(repository.files)
    sizes = {name: file.size for name, file in repository.files.items()}

    def told(wanted: Sequence[str]) -> Path:
        downloads = repository.downloads(wanted)
        check_space(model.typed, downloads, folder_of(model))
        announce(sum(one.missing for one in downloads), folder_of(model))
        return repository.pull(wanted)

    with one_line(model.typed):
        if model.file or (not has_safetensors(names) and gguf_models(names)):
            files = chosen_gguf(model, sizes)
            return told(files) / files[0]
        if not has_safetensors(names):
            raise no_weights(model, names)
        snapshot = repository.pull(small_files(names))
        return told([*(name for name in weights_of(snapshot) if name in sizes), *small_files(names)])


def check_pinned(model: HubModel, repository: Repository) -> None:
    """Raise OtherFile if the hub's file is not the one that a short name stands for."""
    if model.package is not None:
        (name, *_) = chosen_gguf(model, {name: file.size for name, file in repository.files.items()})
        if repository.files[name].sha256 != model.package.sha256:
            raise OtherFile(f"model: {model.typed!r}: the hub has another file as {name}")


class OtherFile(PenstockError):
    """The hub has another file than the one that a short name stands for."""
