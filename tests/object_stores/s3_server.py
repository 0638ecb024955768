"""A fake S3: the part of the REST API that obstore needs, path-style, with checked signatures.

https://docs.aws.amazon.com/AmazonS3/latest/API/API_Operations_Amazon_Simple_Storage_Service.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape, unescape

from tests.object_stores.store_server import Answer, Request, StoredObject, StoreServer, ranged

KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET = "of a test, and of nothing else"
REGION = "eu-test-1"

_TIME = "2026-01-01T00:00:00Z"
_XML = "<?xml version='1.0' encoding='UTF-8'?>\n"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/s3/aws4_request, ?SignedHeaders=([^,]+), ?Signature=(\w+)"
)


class S3Server(StoreServer):
    """One region of S3, with one pair of keys."""

    scheme = "s3"
    copy_source = "x-amz-copy-source"

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[tuple[str, int], bytes] = {}

    def environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_REGION": REGION, **keys}

    def kind(self, request: Request) -> str:
        """Returns the method, or ``LIST``."""
        if request.method == "POST" and "delete" in request.query:
            return "DELETE"
        return "LIST" if "list-type" in request.query else request.method

    def error(self, status: int, code: str) -> Answer:
        text = f"<Error><Code>{code}</Code><Message>{code} it is</Message><RequestId>1</RequestId></Error>"
        return Answer(
            status, f"<?xml version='1.0' encoding='UTF-8'?>\n{text}".encode(), {"Content-Type": "application/xml"}
        )

    def answer(self, request: Request) -> Answer:
        bucket, _, key = unquote(request.path).lstrip("/").partition("/")
        if request.method == "HEAD" and not key:  # the question for the region needs no credentials
            return Answer(200 if bucket in self.buckets else 404, headers={"x-amz-bucket-region": REGION})
        refused = self.refusal(request)
        if refused is not None:
            return refused
        if bucket not in self.buckets:
            return self.error(404, "NoSuchBucket")
        if request.method == "POST" and "delete" in request.query:
            return self._delete_several(bucket, request)
        if "uploads" in request.query or "uploadId" in request.query:
            return self._block(bucket, key, request)
        if not key:
            return self._list(bucket, request.query)
        if request.method == "PUT":
            return self._put(bucket, key, request)
        if request.method == "DELETE":
            self.buckets[bucket].pop(key, None)
            return Answer(204)
        return self._get(bucket, key, request.headers)

    def _get(self, bucket: str, key: str, headers: Mapping[str, str]) -> Answer:
        found = self.buckets[bucket].get(key)
        if found is None:
            return self.error(404, "NoSuchKey")
        part = ranged(found.content, headers.get("range") if self.ranges else None)
        if part is None:
            return self.error(416, "InvalidRange")
        return Answer(part[0], part[1], {**self.described(found), "Accept-Ranges": "bytes", **part[2]})

    def _put(self, bucket: str, key: str, request: Request) -> Answer:
        if self.copy_source in request.headers:
            return self._copy(bucket, key, request)
        if "content-length" not in request.headers:
            return self.error(411, "MissingContentLength")
        refused = self.condition(self.buckets[bucket].get(key), request) if self.conditions else None
        return refused or Answer(200, headers=self.described(self.put(bucket, key, request.body)))

    def _block(self, bucket: str, key: str, request: Request) -> Answer:
        """Begins, goes on with, completes or aborts an upload in blocks."""
        if request.method == "POST" and "uploads" in request.query:
            text = "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            return Answer(200, f"{_XML}{text}".encode())
        name = f"{bucket}/{key}"
        if request.method == "PUT":
            self.blocks[name, int(request.query["partNumber"])] = request.body
            return Answer(200, headers={"ETag": '"a block"'})
        blocks = [self.blocks.pop(one) for one in sorted(self.blocks) if one[0] == name]
        if request.method == "DELETE":
            return Answer(204)
        tag = self.described(self.put(bucket, key, b"".join(blocks)))["ETag"]
        text = f"<CompleteMultipartUploadResult><ETag>{escape(tag)}</ETag></CompleteMultipartUploadResult>"
        return Answer(200, f"{_XML}{text}".encode())

    def condition(self, old: StoredObject | None, request: Request) -> Answer | None:
        """Returns the refusal of a write whose condition is not met, or None."""
        if request.headers.get("if-none-match") == "*" and old is not None:
            return self.error(412, "PreconditionFailed")
        wanted = request.headers.get("if-match")
        if wanted is not None and (old is None or self.described(old)["ETag"] != wanted):
            return self.error(404, "NoSuchKey") if old is None else self.error(412, "PreconditionFailed")
        return None

    def described(self, found: StoredObject) -> dict[str, str]:
        """Returns the headers that describe an object."""
        return {"ETag": _tag(found)}

    def _copy(self, bucket: str, key: str, request: Request) -> Answer:
        source_bucket, _, source = unquote(request.headers[self.copy_source]).lstrip("/").partition("/")
        found = self.buckets.get(source_bucket, {}).get(source)
        if found is None:
            return self.error(404, "NoSuchKey")
        tag = _tag(self.put(bucket, key, found.content))
        return Answer(200, f"<CopyObjectResult><ETag>{escape(tag)}</ETag></CopyObjectResult>".encode())

    def _delete_several(self, bucket: str, request: Request) -> Answer:
        keys = re.findall(r"<Key>(.*?)</Key>", request.body.decode())
        for key in keys:
            self.buckets[bucket].pop(unescape(key), None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return Answer(200, f"{_XML}<DeleteResult>{deleted}</DeleteResult>".encode())

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = [key for key in self.keys(bucket, prefix) if key > after]
        size = min(self.page, int(query.get("max-keys", "1000")))
        more = len(keys) > size
        parts = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified>"
            f"<Size>{len(self.buckets[bucket][key].content)}</Size></Contents>"
            for key in keys[:size]
        ]
        if more:
            parts.append(f"<NextContinuationToken>{escape(keys[size - 1])}</NextContinuationToken>")
        text = "".join(
            [
                f"{_XML}<ListBucketResult>",
                f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{min(size, len(keys))}</KeyCount>",
                f"<MaxKeys>{size}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>",
                *parts,
                "</ListBucketResult>",
            ]
        )
        return Answer(200, text.encode(), {"Content-Type": "application/xml"})

    def refusal(self, request: Request) -> Answer | None:
        """Checks the content and the signature as S3 does; returns the refusal, or None.

        https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        if request.headers.get("x-amz-content-sha256") != hashlib.sha256(request.body).hexdigest():
            return self.error(400, "XAmzContentSHA256Mismatch")
        match = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if match is None:
            return self.error(403, "AccessDenied")
        key_id, day, region, names, signature = match.groups()
        if key_id != KEY_ID:
            return self.error(403, "InvalidAccessKeyId")
        if region != REGION:
            return self.error(400, "AuthorizationHeaderMalformed")
        pairs = sorted((quote(name, safe=""), quote(value, safe="")) for name, value in request.query.items())
        canonical = "\n".join(
            [
                request.method,
                quote(unquote(request.path), safe="/"),
                "&".join(f"{name}={value}" for name, value in pairs),
                *(f"{name}:{request.headers.get(name, '').strip()}" for name in names.split(";")),
                "",
                names,
                request.headers.get("x-amz-content-sha256", ""),
            ]
        )
        scope = f"{day}/{region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", request.headers.get("x-amz-date", ""), scope, digest])
        secret = f"AWS4{SECRET}".encode()
        for part in (day, region, "s3", "aws4_request", text):
            secret = hmac.digest(secret, part.encode(), "sha256")
        return None if secret.hex() == signature else self.error(403, "SignatureDoesNotMatch")


def _tag(found: StoredObject) -> str:
    return f'"{hashlib.md5(b"%d %d" % (found.generation, len(found.content))).hexdigest()}"'
