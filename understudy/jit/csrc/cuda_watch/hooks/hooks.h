// How an interposed function is declared.
#pragma once

// Seen by the dynamic linker; everything else in the library is hidden.
#define UNDERSTUDY_HOOK extern "C" __attribute__((visibility("default")))
