"""Upload of a finished adapter to a bucket or the Hugging Face Hub.

The run is finished and recorded before the upload, so a failed upload loses nothing: it is reported
with an exit code, and the same job tries again. The manifest is uploaded last: if it exists, the
files next to it are complete.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kubelora_api.names import OutputPath
from kubelora_api.uri import Place, parse_place
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.utils.errors import RunEndedError, StorageError, UploadError


def push(folder: OutputFolder, uri: str) -> None:
    """Upload the adapter's files and the manifest to ``uri`` (s3:// or hf://).

    Raises StorageError if the URI or its permissions are wrong, and UploadError if a retry
    may help.
    """
    place = parse_place(uri)
    files = [*sorted(folder.place(OutputPath.ADAPTER).glob("*.safetensors"))]
    files.append(folder.place(OutputPath.MANIFEST))
    if place.scheme == "s3":
        _to_bucket(files, uri)
    else:
        _to_hub(files, place, uri)


def _to_bucket(files: Sequence[Path], uri: str) -> None:
    import fsspec

    prefix = uri.rstrip("/")
    try:
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        for file in files:
            remote = f"{prefix}/{file.name}"
            system.put_file(str(file), remote)
            found = int(system.info(remote)["size"])
            if found != file.stat().st_size:
                raise OSError(f"{remote} has {found} bytes, but {file.stat().st_size} were sent")
    except ImportError:
        raise _wrong(uri, "the package s3fs is not installed: pip install s3fs") from None
    except PermissionError as error:
        raise _wrong(uri, f"access is denied ({error}): check the credentials") from error
    except FileNotFoundError as error:
        raise _wrong(uri, f"the bucket does not exist ({error})") from error
    except Exception as error:  # botocore's errors share no base class
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            why = "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise _wrong(uri, why) from error
        raise _failed(uri, error) from error


def _to_hub(files: Sequence[Path], place: Place, uri: str) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi, errors

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        api.create_repo(place.root, private=True, exist_ok=True)
        if place.revision:
            api.create_branch(place.root, branch=place.revision, exist_ok=True)
        api.create_commit(
            place.root,
            [CommitOperationAdd(file.name, str(file)) for file in files],
            commit_message="Adapter trained by KubeLoRA",
            revision=place.revision,
        )
    except (errors.LocalTokenNotFoundError, errors.GatedRepoError) as error:
        raise _wrong(uri, "the Hub needs a token with write access: set HF_TOKEN") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403, 404):
            why = f"the Hub refuses (HTTP {status}): set HF_TOKEN to a token with write access"
            raise _wrong(uri, why) from error
        raise _failed(uri, error) from error
    except Exception as error:  # network errors of whichever client the library uses
        raise _failed(uri, error) from error


def _wrong(uri: str, why: str) -> RunEndedError:
    return StorageError(f"{_DONE} {uri}: {why}. {_AGAIN}")


def _failed(uri: str, error: Exception) -> RunEndedError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UploadError(f"{_DONE} {uri} ({reason}). {_AGAIN}")


_DONE = "the adapter is trained and saved in the output folder, but could not be uploaded to"
_AGAIN = "Run the same job again to retry the upload; nothing is trained again"
