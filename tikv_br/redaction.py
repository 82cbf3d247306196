"""What text must not carry out of the process: credentials, and control characters, which may come from files of others.

Credentials become ``***``: a safety net behind code that should not print any.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_SECRETS = re.compile(
    r"(?i)((?:secret[-_]?access[-_]?key|access[-_]?key(?:[-_]?id)?|session[-_]?token|password|authorization"
    r"|account[-_]?key|azure_storage_(?:key|sas_key|sas_token)(?==)|(?<!azure_storage_)sas[-_]?(?:token|key)|(?<![\w-])sig(?==)"
    r"|(?<![\w.-])--token(?![\w.-])|(?<![\w.-])token(?=['\"]?\s*[=:])"
    r"|(?<![\w.-])(?:--)?crypter\.key(?![\w.-]))['\"]?(?:\s*[=:]\s*['\"]?|\s+))((?:(?:bearer|basic)\s+)?[^\s&'\",}]+)"
)
_SETTING = re.compile(r"(?<![\w.-])([\w.-]*\w)(['\"]?\s*=\s*['\"]?|['\"]?:\s*['\"]?(?=\S))(?=[^\s&'\",}])")
"""The name of a setting and what is between it and its value, in any notation."""
_VALUE = re.compile(r"[^\s&'\",}]+")
_SECRET_WORDS = re.compile(
    r" (secrets?|pass(?:word|wd|phrase)s?|tokens?|credentials?(?= $)|sas|jaas|oauthbearer config|user info|connection string"
    r"|(?:access|account|api|customer|encryption|keystore|master|private|provided|secret|service account|shared|storage|ssl) key) "
)
"""Words that make a setting secret: of Spark, of Hadoop's clients of the clouds, of the clouds' own, and of Kafka's clients."""
_NO_SECRETS = re.compile(
    r" (algorithm|alias|arn|class|column|endpoint|expiry|file|format|interval|lifetime|location|method|name|path|port|provider|scope|service"
    r"|strategy|ttl|type|uri|url)s? $"
)
"""Last words of settings that describe a secret, and are none."""
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)
_KAFKA = re.compile(r"(?i)(kafka://)([^\s'\"?]*)")
"""A password may contain what should be percent-encoded there."""
_SECRET_URLS = re.compile(
    r"(?i)((?:heartbeat|webhook)[-_]url['\"]?(?:\s*[=:]\s*['\"]?|\s+))(https?://(?:[^\s'\",}]|,(?=[^\s'\"]))+)"
)
"""URLs that are secrets themselves: knowing one is enough to post to the service."""
_USER_INFO = re.compile(r"(://)[^/@\s]+@|(?<![^\s/@'\"])([^\s/@'\"]+)@(?=[\w\[])")
_USER = re.compile(r"(?<![\w/])[^:]")


def is_secret(setting: str) -> bool:
    """Whether a setting of this name, such as ``spark.hadoop.fs.s3a.secret.key``, holds a secret."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", f" {setting} ")  # keyStorePassword
    words = re.sub(r"[\W_]+", " ", parts).lower()
    return bool(_SECRET_WORDS.search(words)) and not _NO_SECRETS.search(words)


def _secret_settings(text: str) -> Iterator[re.Match[str]]:
    """The values of secret settings, which do not overlap. The value of another setting may be one itself, as of spark-conf."""
    at = 0
    while (setting := _SETTING.search(text, at)) is not None:
        at = setting.end()
        # In prose, a colon follows words such as "credentials", and names of variables.
        is_setting = "." in setting[1] or re.search("['\"=]", setting[2])
        if is_setting and is_secret(setting[1]) and (value := _VALUE.match(text, at)) is not None:
            yield value
            at = value.end()


def _mask_user_info(found: re.Match[str]) -> str:
    if found[1]:
        return f"{found[1]}***@"
    start, end = found.span(2)
    colon = found.string.rfind(":", start, end - 1)
    user = _USER.search(found.string, start, max(colon, start))
    return found[0] if user is None else f"{found.string[start : user.start()]}***@"


def _mask_kafka(found: re.Match[str]) -> str:
    _, at, address = found[2].rpartition("@")
    return f"{found[1]}***@{address}" if at else found[0]


def secrets_in(text: str) -> list[str]:
    """The values that `redact` replaces in key=value pairs; not the user info of URLs."""
    found = [match[2] for pattern in (_SECRETS, _SECRET_URLS) for match in pattern.finditer(text)]
    return found + [value[0] for value in _secret_settings(text)]


def redact(text: str) -> str:
    """Replace credentials in URL parameters, key=value pairs, private keys and the user info of URLs.

    In a time that grows with the text's length only: it may come from a file, or a server.
    """
    text = _SECRETS.sub(r"\1***", _PRIVATE_KEY.sub("***", text))
    ends = [0, *(end for value in _secret_settings(text) for end in value.span()), len(text)]
    text = "***".join(text[start:end] for start, end in zip(ends[::2], ends[1::2], strict=True))
    text = _KAFKA.sub(_mask_kafka, _SECRET_URLS.sub(r"\1***", text))
    return _USER_INFO.sub(_mask_user_info, text)


def visible(text: str, keep: str = "") -> str:
    """A text with control, direction and line-end characters and lone surrogates as escapes, except those in ``keep``.

    A terminal would obey them, and a line break would look like a line of our own.
    """
    plain = text
    for char in keep:
        plain = plain.replace(char, "")
    if plain.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode("ascii")
        if _is_control(char) and char not in keep
        else char
        for char in text
    )


def visible_lines(text: str) -> str:
    """A text of several lines, as `visible`."""
    return visible(text, keep="\n\t")


def _is_control(char: str) -> bool:
    return not char.isprintable() and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
