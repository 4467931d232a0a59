// A fuzz target with a fault: it reads behind its input.
#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) { return data[bytes] != 0; }
