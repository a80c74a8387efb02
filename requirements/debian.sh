#!/bin/sh
# Programs that tests use and pip cannot bring. Without them the tests that need them are skipped.
set -eu
command -v espeak-ng >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends espeak-ng; } \
        >/dev/null && exit 0
fi
echo "note: espeak-ng is not installed (apt-get install espeak-ng); tests that speak with it are skipped" >&2
