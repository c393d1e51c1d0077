// What a stranger's program includes that needs nothing but the standard library; examples/quick_start.cpp uses components.
#include <cstdio>
#include <ddp/ddp.hpp>

int main() {
    std::printf("ddp %d.%d.%d\n", ddp::version_major, ddp::version_minor, ddp::version_patch);
}
