// Which PyTorch this library was built for. activation.py reads it from the file, before it loads it: a
// library built for another PyTorch must not be loaded.
namespace understudy::client {

extern const char build_stamp[];
__attribute__((used)) const char build_stamp[] = "understudy-built-for-torch=" UNDERSTUDY_TORCH_VERSION ";";

}  // namespace understudy::client
