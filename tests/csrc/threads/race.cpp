// A race, by which a ThreadSanitizer shows that it works here.
#include <thread>

int n;

int main() {
  std::thread other([] { n++; });
  n++;
  other.join();
}
