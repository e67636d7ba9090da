"""`kubelora validate`: check a job file as the API server would, before anything is sent.

It imports neither torch nor a cluster client, so that it is fast in an editor or a pipeline.
"""

from collections.abc import Iterable

from kubelora_api.documents import InvalidDocumentError, check_change, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_trainer.cli.job_file import JobDocument, load_job_documents
from kubelora_trainer.utils.errors import ConfigurationError


def validate_files(paths: Iterable[str], *, local: bool, against: str | None) -> list[str]:
    """Check job files and return one line per valid job.

    Args:
        paths: The files.
        local: Accept local paths too, as `kubelora train` does.
        against: File with the running resource (`kubectl get ltj NAME -o yaml`); the change from it
            to the given job is checked as well.

    Raises:
        ConfigurationError: Lists every problem of every file.
    """
    lines: list[str] = []
    wrong: list[str] = []
    for path in paths:
        try:
            for source in load_job_documents(path):
                lines.append(_checked(source, local, against))
        except ConfigurationError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return lines


def _checked(source: JobDocument, local: bool, against: str | None) -> str:
    job = _parsed(source, local)
    if against is not None:
        problems = check_change(job, _parsed(_only_job(against), local))
        if problems:
            raise source.refuse(problems)
    return f"{source.path}: {job.metadata.name}: valid"


def _parsed(source: JobDocument, local: bool) -> LoraTrainingJob:
    try:
        return parse_job(source.document, local=local)
    except InvalidDocumentError as invalid:
        raise source.refuse(invalid.problems) from None


def _only_job(path: str) -> JobDocument:
    documents = load_job_documents(path)
    if len(documents) > 1:
        raise ConfigurationError(
            f"{path}: holds {len(documents)} jobs; pass a file with only the one to compare with"
        )
    return documents[0]
