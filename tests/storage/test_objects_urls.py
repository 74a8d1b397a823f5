"""What s3, gs and az URLs may say, and what nobody may say with them."""

import importlib.util
import json
import shlex

import pytest

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import check_storage
from kvarve.storage.objects._bucket import Bucket, Settings, key_of, name_of
from kvarve.storage.objects._object_backend import read_settings
from kvarve.storage.urls import parse_url
from kvarve.testing.suite import LABEL

SECRET = "hunter2"


def settings(url: str, **environ: str) -> Settings:
    return read_settings(parse_url(url), environ)


def test_a_url_says_where_and_how():
    found = settings(
        "s3://my-bucket/kv/pages/?region=eu-central-1&ttl=30h&capacity=1TiB&threads=32&sse=aws:kms&kms_key=arn:aws:kms:x"
        "&bucket_key=yes&endpoint=https://minio:9000/&virtual_host=no&profile=work&read_only=yes"
    )
    assert (found.scheme, found.bucket, found.prefix, found.where) == (
        "s3",
        "my-bucket",
        "kv/pages",
        "s3://my-bucket/kv/pages",
    )
    assert (found.ttl_s, found.capacity_bytes, found.threads) == (30 * 3600.0, 1 << 40, 32)
    assert (found.profile, found.read_only) == ("work", True)
    assert found.config == {
        "region": "eu-central-1",
        "server_side_encryption": "aws:kms",
        "sse_kms_key_id": "arn:aws:kms:x",
        "sse_bucket_key_enabled": True,
        "virtual_hosted_style_request": False,
        "endpoint": "https://minio:9000",
    }
    assert settings("s3://b-1").prefix == ""
    assert settings("s3://b-1", AWS_ENDPOINT_URL="http://10.0.0.1:9000").config == {"endpoint": "http://10.0.0.1:9000"}
    assert settings("gs://b-1/x?anonymous=yes").config == {"skip_signature": True}
    assert settings("az://pages/x?account=mine").config == {"account_name": "mine"}


@pytest.mark.parametrize(
    "url",
    [
        "gs://b-1/x",
        "gs://b-1/x?endpoint=http://127.0.0.1:9",
        "az://pages/x?account=mine",
        "s3://b-1/x?region=eu-central-1",
    ],
)
@pytest.mark.skipif(not importlib.util.find_spec("obstore"), reason="needs obstore")
def test_each_cloud_has_a_store_of_the_library(url, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    assert type(Bucket(settings(url)).store).__name__ in ("S3Store", "GCSStore", "AzureStore")


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///path",
        "s3://b",
        "s3://bucket:9000/x",
        "s3://-bucket/x",
        "s3://b%20t/x",
        f"s3://{'b' * 300}/x",
        "s3://bucket/a//b",
        "s3://bucket/../x",
        "s3://bucket/a/./b",
        "s3://bucket/%00",
        "s3://bucket/%0Aline",
        "s3://bucket/a%2F..%2Fb",
        "s3://bucket/é",
        "s3://bucket/*",
        f"s3://bucket/{'a/' * 300}b",
        "s3://bucket/x?threads=0",
        "s3://bucket/x?threads=257",
        "s3://bucket/x?threads=-1",
        "s3://bucket/x?ttl=0s",
        "s3://bucket/x?ttl=soon",
        "s3://bucket/x?capacity=0",
        "s3://bucket/x?sse=rot13",
        "s3://bucket/x?read_only=perhaps",
        "s3://bucket/x?tls_ca=here.pem",
        "s3://bucket/x?endpoint=minio:9000",
        "s3://bucket/x?endpoint=file:///etc/passwd",
        "s3://bucket/x?endpoint=http://host:99999",
        "s3://bucket/x?endpoint=http://host/%3Fa=b",
        "s3://bucket/x?endpoint=http://[::1",
        "s3://bucket/x?region=eu.evil.org/",
        "s3://bucket/x?kms_key=%0Aheader",
        "az://bucket/x?account=evil.org/",
        "gs://bucket/x?region=eu",
        "az://bucket/x?sse=AES256",
    ],
)
def test_a_url_that_means_nothing_is_refused_in_one_line(url):
    with pytest.raises(ConfigError) as refusal:
        check_storage(url, label=LABEL, description="model A")
    told = str(refusal.value)
    assert "\n" not in told and "\0" not in told
    assert len(told) < 1500


@pytest.mark.parametrize(
    "url",
    [
        f"s3://me:{SECRET}@bucket/x",
        f"s3://{SECRET}@bucket/x",
        f"s3://bucket/x?secret_access_key={SECRET}",
        f"s3://bucket/x?session_token={SECRET}",
        f"gs://bucket/x?service_account_key={SECRET}",
        f"az://bucket/x?access_key={SECRET}",
        f"s3://bucket/x?endpoint=http://host/?sig={SECRET}",
        f"s3://bucket/x?endpoint=http://me:{SECRET}@host",
        f"s3://bucket/x?endpoint=http%3A%2F%2Fme%3A{SECRET}%40host",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError) as refusal:
        check_storage(url, label=LABEL, description="model A")
    assert SECRET not in str(refusal.value)


def test_an_endpoint_of_the_environment_is_not_quoted():
    with pytest.raises(ConfigError) as refusal:
        settings("s3://bucket/x", AWS_ENDPOINT_URL=f"http://me:{SECRET}@host")
    assert SECRET not in str(refusal.value)


def test_a_profile_of_a_user_without_a_home_is_refused_in_a_line(monkeypatch):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~no-such-user/.aws/credentials")
    with pytest.raises(StorageError, match="it has no keys of the profile 'work', or cannot be read"):
        Bucket(settings("s3://bucket/x?region=us-east-1&profile=work"))


def test_the_longest_key_is_one_that_a_bucket_takes():
    root = f"{'p' * 400}/kvarve-{'ff' * 64}"
    assert len(key_of("n" * 200, root)) <= 1024


def test_only_a_key_that_we_would_make_is_ours():
    root = f"a/kvarve-{LABEL.hex()}"
    assert name_of(key_of("g-1.kv", root), root) == "g-1.kv"
    wrong = "00" if key_of("g-1", root).split("/")[-2] != "00" else "01"
    for key in (f"{root}/{wrong}/g-1", f"{root}/g-1", f"{root}/00/", f"{root}/about.json", "g-1", f"x/{root}/00/g-1"):
        assert name_of(key, root) is None, key


def test_the_command_of_the_lifecycle_says_days_and_the_prefix():
    injected = "http://h/';touch x;'"
    assert injected in shlex.split(settings(f"s3://bucket?ttl=1d&endpoint={injected}").lifecycle() or "")
    command = shlex.split(settings("s3://bucket/kv?ttl=30h&endpoint=http://h:1").lifecycle() or "")
    assert command[:6] == ["aws", "s3api", "put-bucket-lifecycle-configuration", "--bucket", "bucket", "--endpoint-url"]
    (rule,) = json.loads(command[-1])["Rules"]
    assert (rule["Filter"], rule["Expiration"]) == ({"Prefix": "kv/kvarve-"}, {"Days": 2})
    assert settings("s3://bucket").lifecycle() is None
    assert settings("gs://bucket?ttl=1d").lifecycle() is None
