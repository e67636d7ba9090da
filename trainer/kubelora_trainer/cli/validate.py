"""`kubelora validate`: what the API server would say of a job file, before anything is sent.

Knows neither torch nor a cluster, so that it can run in an editor or a pipeline in a blink.
"""

from collections.abc import Iterable

from kubelora_api.documents import InvalidDocumentError, check_change, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_trainer.cli.job_file import JobDocument, load_job_documents
from kubelora_trainer.utils.errors import ConfigurationError


def validate_files(paths: Iterable[str], *, local: bool, against: str | None) -> list[str]:
    """One line for each job that is right.

    local: judge as `kubelora train` does, which takes paths of this machine too.
    against: file with the running resource (`kubectl get ltj NAME -o yaml`), whose change to the
    one given is judged as well.
    Raises ConfigurationError with every problem of every file.
    """
    lines: list[str] = []
    wrong: list[str] = []
    for path in paths:
        try:
            for source in load_job_documents(path):
                lines.append(_judge(source, local, against))
        except ConfigurationError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return lines


def _judge(source: JobDocument, local: bool, against: str | None) -> str:
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
            f"{path}: holds {len(documents)} jobs; give the one to compare with"
        )
    return documents[0]
