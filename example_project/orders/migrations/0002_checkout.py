from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("orders", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Approval",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("order", models.CharField(max_length=16, unique=True)),
                ("token", models.CharField(max_length=80)),
            ],
        ),
        migrations.AlterField(
            model_name="order",
            name="status",
            field=models.CharField(
                choices=[
                    ("placed", "placed"),
                    ("shipped", "shipped"),
                    ("accepted", "accepted"),
                    ("refused", "refused"),
                ],
                default="placed",
                max_length=16,
            ),
        ),
    ]
